"""The time in which TensorFlow waits for gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import tensorflow as tf
from exposed_waits import assert_exposed, assert_late_rank_is_waited_for, exposed_seconds

import sirtaki.tensorflow as hvd
from cases import case


def by_tape(variable: Any) -> None:
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(variable * variable) * (hvd.rank() + 1.0)
    variable.assign_sub(0.1 * tape.gradient(loss, variable))


def by_optimizer(variable: Any, op: int = hvd.Average) -> None:
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), op=op)
    optimizer.minimize(lambda: tf.reduce_sum(variable * variable) * (hvd.rank() + 1.0), var_list=[variable])


STEPS: dict[str, Callable[[Any], None]] = {
    "tape": by_tape,
    "optimizer": by_optimizer,
    "Adasum": lambda variable: by_optimizer(variable, hvd.Adasum),
}


def make_variable() -> Any:
    return tf.Variable([1.0, 2.0])


@case(least=2, kind=list(STEPS))
def eager_steps_wait_for_their_exchanges(kind: str) -> None:
    variable = make_variable()
    for _ in range(3):
        STEPS[kind](variable)
    assert_exposed("unnamed allreduce", 3)


@case(least=2)
def others_wait_for_a_late_rank() -> None:
    variable = make_variable()
    by_tape(variable)
    assert_late_rank_is_waited_for(lambda: by_tape(variable))


@case(least=2, jit_compile=(False, True))
def nothing_is_measured_in_functions(jit_compile: bool) -> None:
    from sirtaki.tensorflow.ops.xla import is_served

    variable = make_variable()
    if jit_compile and not is_served():
        return
    if jit_compile:
        hvd.enable_xla()
    step = tf.function(lambda: by_tape(variable), jit_compile=jit_compile)
    step()
    assert exposed_seconds() is None


@case(least=2)
def nothing_is_measured_with_gpus() -> None:
    variable = make_variable()
    with mock.patch.object(tf.config, "list_logical_devices", return_value=["GPU:0"]):
        by_tape(variable)
    assert exposed_seconds() is None


@case(least=2)
def nothing_is_measured_if_operations_are_asynchronous() -> None:
    variable = make_variable()
    tf.config.experimental.set_synchronous_execution(False)
    try:
        by_tape(variable)
    finally:
        tf.config.experimental.set_synchronous_execution(True)
    assert exposed_seconds() is None
    by_tape(variable)
    assert exposed_seconds() is not None
