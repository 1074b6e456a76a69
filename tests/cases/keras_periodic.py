"""Local steps in `model.fit`: every rank equals its replica in a training of all ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

import sirtaki.keras as hvd
from cases import case, periodic_replicas
from cases.keras_models import assert_alike, values_of
from cases.warned import warnings_of_this_rank
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.bindings.survivors import Survivors

ROWS, RATE, MOMENTUM = 2, 0.1, 0.5
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # Keras computes losses in float32


def batches_of(rank: int, count: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(rank)
    x = generator.normal(size=(count * ROWS, 3))
    return x, x.sum(axis=1, keepdims=True) + rank


def linear(seed: int = 0) -> Any:
    """Returns a model of a kernel and a bias."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="float64")])
    generator = np.random.default_rng(seed)
    model.set_weights([generator.normal(size=one.shape) for one in model.get_weights()])
    return model


def compiled(model: Any, optimizer: Any = None) -> Any:
    model.compile(optimizer or keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse")
    return model


def fit(model: Any, count: int, *callbacks: Any, **options: Any) -> Any:
    return model.fit(
        *batches_of(hvd.rank(), count),
        batch_size=ROWS,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        **options,
    )


class Replicas(periodic_replicas.Replicas):
    """Linear models, with gradients written out."""

    def __init__(self, size: int) -> None:
        super().__init__(values_of(linear().trainable_variables), size)

    def step(self, rank: int, batch: tuple[Any, Any]) -> None:
        (kernel, bias), (x, y) = self.params[rank], batch
        slope = 2 * (x @ kernel + bias - y) / len(x)
        for place, gradient in enumerate((x.T @ slope, slope.sum(axis=0))):
            self.momenta[rank][place] = MOMENTUM * self.momenta[rank][place] - RATE * gradient
            self.params[rank][place] = self.params[rank][place] + self.momenta[rank][place]

    def epoch(self, counts: Sequence[int], every: int, has_outer: bool = False) -> None:
        """Trains so many batches of each rank, and averages after `every` batches and at the end."""
        for window in range(0, max(counts), every):
            taken = [min(max(count - window, 0), every) for count in counts]
            for rank, count in enumerate(taken):
                x, y = batches_of(rank, counts[rank])
                for batch in range(window, window + count):
                    rows = slice(batch * ROWS, (batch + 1) * ROWS)
                    self.step(rank, (x[rows], y[rows]))
            (self.outer_step if has_outer else self.average)(taken)


def assert_replica(model: Any, replica: Sequence[Any]) -> None:
    for found, expected in zip(values_of(model.trainable_variables), replica, strict=True):
        np.testing.assert_allclose(found, expected, **CLOSE)


@case(how=[(1, False), (3, False), (3, True)])
def all_ranks_train_as_their_replicas(how: tuple[int, bool]) -> None:
    """Rank r has 7 - 2r batches in each epoch; the last window of each is averaged by weights."""
    every, has_outer = how
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True) if has_outer else None
    counts = [max(7 - 2 * rank, 1) for rank in range(hvd.size())]
    model, replicas = compiled(linear()), Replicas(hvd.size())
    seen: list[Any] = []
    record = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(values_of(model.trainable_variables))
    )
    fit(model, counts[hvd.rank()], hvd.callbacks.LocalSGDCallback(every, outer), record, epochs=2)
    for found in seen:
        replicas.epoch(counts, every, has_outer)
        for one, expected in zip(found, replicas.params[hvd.rank()], strict=True):
            np.testing.assert_allclose(one, expected, **CLOSE)
    assert len(seen) == 2
    assert_replica(model, replicas.params[hvd.rank()])
    assert_alike(model.trainable_variables)


@case()
def a_second_training_goes_on_with_each_ranks_momenta() -> None:
    model, replicas = compiled(linear()), Replicas(hvd.size())
    for _ in range(2):
        fit(model, 2, hvd.callbacks.LocalSGDCallback(2))
        replicas.epoch([2] * hvd.size(), 2)
    assert_replica(model, replicas.params[hvd.rank()])


@case()
def batches_of_one_execution_are_counted() -> None:
    """Ranks with 5 and fewer batches, four of which are executed together."""
    counts = [max(5 - 3 * rank, 1) for rank in range(hvd.size())]
    model, replicas = linear(), Replicas(hvd.size())
    together = 1 if keras.backend.backend() == "torch" else 4  # Keras has no more on torch
    model.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse", steps_per_execution=together)
    fit(model, counts[hvd.rank()], hvd.callbacks.LocalSGDCallback(100))
    replicas.epoch(counts, 100)
    assert_replica(model, replicas.params[hvd.rank()])


@case()
def windows_may_span_epochs() -> None:
    """With each_epoch=False, four batches are averaged after three, and the last after the training."""
    model, replicas = compiled(linear()), Replicas(hvd.size())
    fit(model, 2, hvd.callbacks.LocalSGDCallback(3, each_epoch=False), epochs=2)
    for number in range(4):
        for rank in range(hvd.size()):
            x, y = batches_of(rank, 2)
            rows = slice(number % 2 * ROWS, (number % 2 + 1) * ROWS)
            replicas.step(rank, (x[rows], y[rows]))
        if number in (2, 3):
            replicas.average([1.0] * hvd.size())
    assert_replica(model, replicas.params[0])
    assert_alike(model.trainable_variables)


@case()
def an_outer_rate_of_one_averages() -> None:
    results = []
    for outer in (None, keras.optimizers.SGD(1.0)):
        model = compiled(linear())
        fit(model, 1, hvd.callbacks.LocalSGDCallback(1, outer))
        results.append(values_of(model.trainable_variables))
    for averaged, stepped in zip(*results, strict=True):
        unit = np.finfo(averaged.dtype).eps * np.abs(averaged).max()
        assert np.abs(averaged - stepped).max() <= 2 * unit


@case()
def statistics_are_averaged() -> None:
    """Those of a frozen layer are not."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(momentum=0.5, name="free"),
            keras.layers.BatchNormalization(name="frozen"),
            keras.layers.Dense(1),
        ]
    )
    frozen, free = model.get_layer("frozen"), model.get_layer("free")
    frozen.trainable = False
    frozen.moving_mean.assign(np.full(3, hvd.rank(), np.float32))
    for weight in model.layers[-1].weights:
        weight.assign(np.ones(weight.shape))
    compiled(model)
    fit(model, 1, hvd.callbacks.LocalSGDCallback(1))
    means = [batches_of(rank, 1)[0].mean(axis=0) for rank in range(hvd.size())]
    np.testing.assert_allclose(values_of([free.moving_mean])[0], 0.5 * sum(means) / len(means), **CLOSE)
    np.testing.assert_array_equal(values_of([frozen.moving_mean])[0], hvd.rank())


@case()
def validation_sees_the_average() -> None:
    model = compiled(linear())
    x, y = batches_of(99, 2)
    history = fit(model, 2, hvd.callbacks.LocalSGDCallback(100), validation_data=(x, y)).history
    found = hvd.allgather(np.array(history["val_loss"]))
    assert len(set(found.tolist())) == 1
    np.testing.assert_allclose(found[0], model.evaluate(x, y, verbose=0), rtol=1e-5)


@case(least=2)
def a_broadcast_comes_first_and_does_not_warn() -> None:
    """Ranks may have different numbers of batches, and a plain optimizer."""
    model = compiled(linear(seed=hvd.rank()))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.LocalSGDCallback(2)]
    with warnings_of_this_rank() as warned:
        fit(model, 1 + hvd.rank(), *callbacks)
    assert not [one for one in warned if "not distributed" in one]
    assert_alike(model.trainable_variables)


@case(least=2)
def unequal_starts_are_refused() -> None:
    model = compiled(linear(seed=hvd.rank()))
    with pytest.raises(ParametersDifferError, match="BroadcastGlobalVariablesCallback"):
        fit(model, 1, hvd.callbacks.LocalSGDCallback(2))


@case()
def other_uses_are_refused() -> None:
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"every is {every}"):
            hvd.callbacks.LocalSGDCallback(every)
    distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for outer in (0.7, distributed):
        with pytest.raises(ValueError, match="outer has to be a plain optimizer"):
            hvd.callbacks.LocalSGDCallback(2, outer)
    callback = hvd.callbacks.LocalSGDCallback(2)
    with pytest.raises(ValueError, match="averages gradients as well"):
        fit(compiled(linear(), distributed), 1, callback)
    with pytest.raises(ValueError, match="use_ema=True"):
        fit(compiled(linear(), keras.optimizers.SGD(RATE, use_ema=True)), 1, callback)
    late = keras.Sequential([keras.layers.Dense(1)])
    if hvd.rank() == 0 and hvd.size() > 1:
        late.build((None, 3))
    callback.set_model(compiled(late))  # most models get their weights before the callbacks are called
    with pytest.raises(ValueError, match=f"no weights yet on rank {min(hvd.size() - 1, 1)}"):
        callback.on_train_begin()
    context = current()
    context.survivors = Survivors()
    try:
        with pytest.raises(ValueError, match="has to be part of the state"):
            fit(compiled(linear()), 1, callback)
    finally:
        context.survivors = None
