"""Loss scaling in Keras: an overflow on one rank counts as an overflow on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest

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


@case(order=list(ORDERS), least=2)
def an_overflow_of_a_gradient_that_stays_on_its_rank(order: str) -> None:
    """All ranks skip that step, too: the others would otherwise step with another scale from then on."""
    with mixed_precision():
        model = make_model(dtype="mixed_float16")
        optimizer = ORDERS[order]()
        hvd_optimizer = getattr(optimizer, "inner_optimizer", optimizer) if order == "outside" else optimizer
        own = model.layers[-1].bias
        hvd_optimizer.register_local_var(own)
        model.compile(optimizer, "mse")
        stepping = model.optimizer
        stepping.build(model.trainable_variables)
        before = values_of(model.weights)
        for is_broken in (True, False):
            apply(model, own, float("inf") if is_broken and hvd.rank() == hvd.size() - 1 else 1.0)
            assert_alike([stepping.dynamic_scale, *(one for one in model.weights if one is not own)])
            is_same = [np.array_equal(a, b) for a, b in zip(before, values_of(model.weights), strict=True)]
            assert is_same == [is_broken] * len(is_same)


@case(least=2)
def scales_that_differ_beside_variables_of_a_rank() -> None:
    model = make_model()
    optimizer = scaled_outside()
    optimizer.inner_optimizer.register_local_var(model.layers[-1].bias)
    model.compile(optimizer, "mse", run_eagerly=True)
    hvd.broadcast_model(model)
    optimizer.build(model.trainable_variables)
    optimizer.dynamic_scale.assign(2.0 ** hvd.rank())
    with pytest.raises(hvd.ParametersDifferError, match="dynamic_scale"):
        optimizer.finalize_variable_values(model.trainable_variables)


def apply(model: Any, own: Any, value: float) -> None:
    """Steps with gradients of 1, and this value for one variable."""
    gradients = [
        keras.ops.full(one.shape, value if one is own else 1.0, one.dtype)
        for one in model.trainable_variables
    ]
    step(model.optimizer, gradients, model.trainable_variables)


def step(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Applies gradients, on JAX as a compiled step does."""
    if keras.backend.backend() != "jax":
        optimizer.apply(gradients, variables)
        return
    weights, state = optimizer.stateless_apply(
        [variable.value for variable in optimizer.variables],
        gradients,
        [variable.value for variable in variables],
    )
    for variable, new in zip([*variables, *optimizer.variables], [*weights, *state], strict=True):
        variable.assign(new)


@case(order=["outside", "inside"], least=2)
def a_loss_that_is_scaled_once_for_several_steps(order: str) -> None:
    """A program calls `scale_loss` once if it computes gradients in a function that is compiled."""
    variable, optimizer = keras.Variable(np.zeros(2)), ORDERS[order]()
    optimizer.build([variable])
    factor = optimizer.scale_loss(keras.ops.ones((), "float32"))
    for steps in (1, 2):
        step(optimizer, [factor * keras.ops.ones(2, "float32")], [variable])
        np.testing.assert_allclose(values_of([variable])[0], -0.1 * steps, rtol=1e-5)


@case(passes=[1, 2])
def scaled_as_in_one_process(passes: int) -> None:
    """Covers passes that are accumulated, too."""

    def make() -> Any:
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=passes if passes > 1 else None)

    def distribute(optimizer: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(optimizer))

    assert_trained_as_one(make, distribute, run_eagerly=True)


class Scales(keras.callbacks.Callback):
    """A callback that records the scale, and the number of steps, after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, int]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        scale, steps = values_of([self.model.optimizer.dynamic_scale, self.model.optimizer.iterations])
        self.seen.append((float(scale), int(steps)))


@case(initial=[2.0**18, 2.0**22])
def the_same_steps_are_skipped(initial: float) -> None:
    """The scale grows each second step, until a gradient of one process overflows in 16 bits."""
    generator, rows = np.random.default_rng(1), 8
    x = generator.normal(size=(8 * rows * hvd.size(), 8)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) > generator.normal(size=(len(x), 1))).astype("float32")
    mine = np.arange(len(x)).reshape(8, hvd.size(), rows)[:, hvd.rank()].ravel()

    def trained(optimizer: Any, chosen: Any, batch_size: int) -> tuple[Any, Scales]:
        layers = [keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
        last = keras.layers.Activation("sigmoid", dtype="float32")
        model, scales = keras.Sequential([keras.Input((8,)), *layers, last]), Scales()
        starts = np.random.default_rng(2)
        model.set_weights([starts.normal(size=one.shape) / 3 for one in model.get_weights()])
        model.compile(optimizer, "binary_crossentropy")
        options = {"shuffle": False, "verbose": 0, "callbacks": [scales]}
        model.fit(x[chosen], y[chosen], batch_size, **options)
        return model, scales

    def make(optimizer: Any) -> Any:
        return keras.optimizers.LossScaleOptimizer(optimizer, initial, dynamic_growth_steps=2)

    with mixed_precision():
        alone, expected = trained(make(keras.optimizers.SGD(0.1)), np.arange(len(x)), rows * hvd.size())
        together, found = trained(make(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), mine, rows)
    assert found.seen == expected.seen
    for one, other in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-3)
