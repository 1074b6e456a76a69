"""Variables that differ between ranks, and equal batches: detected in eager steps, or on request."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case
from cases.differing import differ, expect_hint_for_equal_batches


def made(rank: int) -> list[Any]:
    return [tf.Variable([1.0 + rank, 2.0], name="weights"), tf.Variable(3.0, name="bias")]


def step(variables: list[Any], batch: float) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variables[0] * batch) ** 2 + variables[1] * batch
    tape = hvd.DistributedGradientTape(tape)
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(0.01 * gradient)


@case(least=2)
def a_forgotten_broadcast() -> None:
    variables, own = made(hvd.rank()), hvd.rank() + 1.0
    step(variables, own)
    differ(
        lambda: step(variables, own),
        r"'0: weights' on rank 1 \(pid \d+ on \S+\) is not as on rank 0 ",
        r"call hvd\.broadcast_variables\(model\.variables, root_rank=0\)",
    )
    differ(lambda: hvd.check_parameters(variables), "'0: weights' on rank 1")
    hvd.broadcast_variables(variables, 0)
    hvd.check_parameters(variables)
    step(variables, own)


@case(least=2)
def a_broadcast_after_the_first_batch() -> None:
    """Follows Horovod's example for TensorFlow 2."""
    variables = made(hvd.rank())
    for number in range(4):
        step(variables, hvd.rank() + 1.0)
        if number == 0:
            hvd.broadcast_variables(variables, 0)
    hvd.check_parameters(variables)


@case(least=2)
def two_models_in_turns() -> None:
    """Each model has a series of its own, and so have the ranks of a set."""
    one, other = made(0), made(hvd.rank())
    for _ in range(3):
        step(one, hvd.rank() + 1.0)
    step(other, hvd.rank() + 1.0)
    differ(lambda: step(other, hvd.rank() + 1.0), "'0: weights' on rank 1")


@case(least=2)
def equal_batches() -> None:
    def train(batch: float) -> None:
        variables = made(0)
        for _ in range(3):
            step(variables, batch)

    expect_hint_for_equal_batches(train)


@case(least=2)
def gradients_by_inputs() -> None:
    """Tensors are not parameters: each rank has its own."""
    for _ in range(3):
        x = tf.constant([hvd.rank() + 1.0])
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(x)
            loss = x * x
        tape.gradient(loss, x)


@case(least=2)
def variables_that_come_and_go() -> None:
    """Ranks identify series alike, though new objects may reuse the numbers of old ones on some ranks."""
    kept = []
    for number in range(40):
        if hvd.rank() == 1 and number % 3 == 0:
            kept.append(made(0))  # so that memory is allocated differently on this rank
        step(made(0), hvd.rank() + 1.0)


@case(least=2)
def sums_of_passes_are_no_parameters() -> None:
    accumulator, variable = hvd.GradientAccumulator(2), tf.Variable([1.0])
    for number in range(6):
        gradients = [tf.constant([hvd.rank() + float(number)])]
        accumulator.add(gradients, lambda sums: variable.assign_sub(sums[0]))
    hvd.check_parameters([variable])
