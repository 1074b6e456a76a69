"""Collectives in functions that XLA compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

import sirtaki.tensorflow as hvd
from cases import case
from cases.tensorflow_collectives import REDUCIBLE, everyone, same, values
from cases.tensorflow_training import batch, close, descend, loss_of, trained_alone, variables
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.tensorflow.ops import xla
from sirtaki.tensorflow.ops.xla import is_served


def compiled(function: Any) -> Any:
    return tf.function(function, jit_compile=True)


def where_served(body: Callable[[], None]) -> Callable[[], None]:
    """Runs the body if TensorFlow's XLA has a known interface; otherwise, functions must raise an error."""

    def enabled() -> None:
        hvd.enable_xla()
        body()

    def refused() -> None:
        with pytest.raises(UnsupportedError, match="jit_compile=False"):
            hvd.enable_xla()
        refuses_allreduce()

    chosen = enabled if is_served() else refused
    chosen.__name__, chosen.__module__ = body.__name__, body.__module__
    return chosen


def refuses_allreduce() -> None:
    with pytest.raises(ValueError, match=r"enable_xla.*jit_compile=False"):
        compiled(lambda: hvd.allreduce(tf.ones([2])))()


@case()
def refused_unless_enabled() -> None:
    with mock.patch.object(xla._Choice, "is_enabled", False):
        refuses_allreduce()


@case()
@where_served
def sums_of_every_dtype() -> None:
    mine = [values(hvd.rank(), (3, 2), dtype) for dtype in REDUCIBLE]
    total = compiled(lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum))
    for _ in range(2):
        for result, dtype in zip(total(mine), REDUCIBLE, strict=True):
            same(result, tf.cast(everyone((3, 2), dtype).sum(0), dtype))


@case()
@where_served
def scalars_factors_and_broadcasts() -> None:
    @compiled
    def several(mine: Any) -> Any:
        scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
        return scaled, hvd.broadcast(mine * 2, hvd.size() - 1, name='a "name"'), hvd.allreduce(mine[None] + 1)

    scaled, last, mean = several(tf.constant(float(hvd.rank()), tf.float64))
    assert float(scaled) == 1.5 * hvd.size() * (hvd.size() - 1) / 2
    assert float(last) == 2.0 * (hvd.size() - 1)
    assert float(mean[0]) == (hvd.size() - 1) / 2 + 1


@case()
@where_served
def many_side_by_side() -> None:
    @compiled
    def step(mine: Any) -> Any:
        return [hvd.allreduce(mine * float(number), op=hvd.Sum) for number in range(12)]

    for _ in range(5):
        results = step(tf.fill([100], hvd.rank() + 1.0))
        factor = hvd.size() * (hvd.size() + 1) / 2
        assert [float(one[0]) for one in results] == [number * factor for number in range(12)]


@case()
@where_served
def training_with_a_tape() -> None:
    model = variables()

    @compiled
    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, inputs, targets)
        descend(model, hvd.DistributedGradientTape(tape).gradient(loss, model))

    for number in range(3):
        step(*batch(hvd.rank(), number))
    close(model, trained_alone(3))


@case()
@where_served
def a_derivative() -> None:
    @compiled
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = hvd.allreduce(x * x, op=hvd.Sum)
        return tape.gradient(result, x)

    assert gradient(tf.constant([3.0])).numpy().tolist() == [6.0 * hvd.size()]


@case()
@where_served
def two_derivatives_have_different_names() -> None:
    """They are independent, so that they may start in different orders on different ranks."""
    names: list[str] = []
    call = xla._module

    def recorded(kind: int, tensors: Any, chosen: list[str], attributes: Any) -> str:
        names.extend(chosen)
        return call(kind, tensors, chosen, attributes)

    @compiled
    def gradients(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            result = hvd.allreduce(x, op=hvd.Sum)
            both = [result * 2.0, result * 3.0]
        return [tape.gradient(one, x) for one in both]

    with mock.patch.object(xla, "_module", recorded):
        found = gradients(tf.constant([3.0]))
    assert [float(one[0]) for one in found] == [2.0 * hvd.size(), 3.0 * hvd.size()]
    assert len(set(names)) == len(names) == 3


@case(least=2)
@where_served
def ranks_that_disagree() -> None:
    total = compiled(lambda one: hvd.allreduce(one, op=hvd.Sum, name="lengths"))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"rank 1.*\[3\]"):
        total(tf.zeros([2 + (hvd.rank() == 1)]))
    assert float(total(tf.ones([2]))[0]) == hvd.size()
