"""Graphs and sessions of TensorFlow 1, in which `==` compares objects and nothing runs by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case
from cases.tensorflow_gradients import COLLECTIVES, values, weights

v1 = tf.compat.v1


def loss(collective: Any, x: Any) -> Any:
    result = collective(x)
    return tf.reduce_sum(result * result * weights(result))


@case()
def gradients_as_eagerly() -> None:
    for name, (collective, shape_of) in COLLECTIVES.items():
        mine = values(hvd.rank(), shape_of(hvd.rank()))
        with tf.GradientTape() as tape:
            x = tf.constant(mine)
            tape.watch(x)
            own = loss(collective, x)
        expected = tape.gradient(own, x)
        with tf.Graph().as_default(), v1.Session() as session:
            x = tf.constant(mine)
            found = session.run(tf.gradients(loss(collective, x), x)[0])
        np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=name)


@case(least=2)
def facts_of_the_world() -> None:
    some = hvd.add_process_set(range(1, hvd.size()))
    with tf.Graph().as_default(), v1.Session() as session:
        facts = [hvd.process_set_included_op(0), hvd.process_set_included_op(some.process_set_id)]
        assert session.run(facts) == [1, int(hvd.rank() > 0)]
        assert session.run(hvd.size_op()) == hvd.size()


@case(uses_resource=[True, False])
def variables_are_overwritten_in_the_session(uses_resource: bool) -> None:
    """Covers both kinds of variables: no value changes before the session runs the operation."""
    root = hvd.size() - 1
    with tf.Graph().as_default(), v1.Session() as session:
        made = [v1.Variable([float(hvd.rank()), number], use_resource=uses_resource) for number in (1.0, 2.0)]
        everything, returned = hvd.broadcast_variables(made, root), hvd.broadcast_(made, 0)
        session.run(v1.global_variables_initializer())
        assert session.run(made)[0].tolist() == [hvd.rank(), 1]
        session.run(everything)
        assert [one.tolist() for one in session.run(made)] == [[root, 1], [root, 2]]
        session.run(v1.global_variables_initializer())
        assert session.run(returned[0]).tolist() == [0, 1]
        assert [one.tolist() for one in session.run(made)] == [[0, 1], [0, 2]]
