"""Loss scaling in Keras: an overflow on one rank counts as an overflow on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

import sirtaki.keras as hvd
from cases import case
from cases.keras_models import BATCH, assert_alike, assert_trained_as_one, data_of, make_model, values_of


@contextmanager
def mixed_precision() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def scaled_outside() -> Any:
    return keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))


def scaled_inside() -> Any:
    return hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))


def scaled_by_keras() -> Any:
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


ORDERS = {"outside": scaled_outside, "inside": scaled_inside, "by Keras": scaled_by_keras}


@case(order=list(ORDERS))
def an_overflow_on_one_rank(order: str) -> None:
    """All ranks skip that step and halve their scale; then they continue."""
    with mixed_precision():
        model = make_model(dtype="mixed_float16")
        model.compile(ORDERS[order](), "mse", run_eagerly=order == "inside")
        x, y = (array.astype("float32") for array in data_of(hvd.rank()))
        model.train_on_batch(x[:BATCH], y[:BATCH])
        before, scale = values_of(model.weights), values_of([model.optimizer.dynamic_scale])[0]
        broken = x[:BATCH].copy()
        broken[0] = np.inf if hvd.rank() == hvd.size() - 1 else 0
        model.train_on_batch(broken, y[:BATCH])
    for expected, found in zip(before, values_of(model.weights), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert values_of([model.optimizer.dynamic_scale])[0] == scale / 2
    model.train_on_batch(x[:BATCH], y[:BATCH])
    assert_alike([*model.weights, *model.optimizer.variables])
    assert all(np.isfinite(one).all() for one in values_of(model.weights))
    assert any((a != b).any() for a, b in zip(before, values_of(model.weights), strict=True))


@case(passes=[1, 2])
def scaled_as_in_one_process(passes: int) -> None:
    """Covers passes that are accumulated, too."""

    def make() -> Any:
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=passes if passes > 1 else None)

    def distribute(optimizer: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(optimizer))

    assert_trained_as_one(make, distribute, run_eagerly=True)
