"""Calls of sirtaki.tensorflow that mean something else in Horovod, with Horovod's rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case

Collective = Callable[[Any], Any]


def gradients_of(collective: Collective, shape: tuple[int, ...]) -> list[Any]:
    """Returns the gradient of (rank + 1) times a result's sum: eager, of a function and of a session."""

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = (hvd.rank() + 1.0) * tf.reduce_sum(collective(x))
        return tape.gradient(loss, x)

    x = tf.ones(shape, tf.float64)
    found = [gradient(x).numpy(), tf.function(gradient)(x).numpy()]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        found.append(session.run(gradient(tf.ones(shape, tf.float64))))
    return found


@case()
def gradient_of_a_gather_is_an_average() -> None:
    for found in gradients_of(hvd.allgather, (hvd.rank() + 1, 2)):
        np.testing.assert_allclose(found, np.full((hvd.rank() + 1, 2), (hvd.size() + 1) / 2))


@case()
def gradient_of_a_broadcast_is_an_average_on_the_root() -> None:
    root = hvd.size() - 1
    for found in gradients_of(lambda x: hvd.broadcast(x, root), (3,)):
        np.testing.assert_allclose(found, np.full(3, (hvd.size() + 1) / 2 * (hvd.rank() == root)))


@case(op=["Sum", "Average"])
def gradient_of_a_reduce_scatter_has_horovods_factor(op: str) -> None:
    factor = hvd.size() if op == "Sum" else 1
    for found in gradients_of(lambda x: hvd.reducescatter(x, op=getattr(hvd, op)), (hvd.size(),)):
        np.testing.assert_allclose(found, factor * np.arange(1.0, hvd.size() + 1))


@case(least=2)
def disagreement_fails_a_precondition() -> None:
    with pytest.raises(tf.errors.FailedPreconditionError):
        hvd.allreduce(tf.ones([hvd.rank() + 1]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        hvd.broadcast(tf.ones([1]), hvd.size())
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()
