"""Training with Keras: the ranks together do what one process with all their batches does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import sirtaki.keras as hvd
from bodies import case
from bodies.keras_models import (
    BATCH,
    STEPS,
    assert_alike,
    assert_close,
    assert_trained_as_one,
    data_of,
    data_of_all,
    gradients_of,
    make_model,
)

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.02),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}


@case(optimizer=list(OPTIMIZERS))
def eager_fit(optimizer: str) -> None:
    assert_trained_as_one(OPTIMIZERS[optimizer], run_eagerly=True)


@case(optimizer=["Adam", "accumulation"])
def compiled_fit(optimizer: str) -> None:
    assert_trained_as_one(OPTIMIZERS[optimizer], run_eagerly=False)


@case()
def several_steps_an_execution() -> None:
    if keras.backend.backend() == "tensorflow":  # the others take one step at a time only
        assert_trained_as_one(OPTIMIZERS["momentum"], steps_per_execution=2)


@case(average=[True, False])
def passes_that_add_up(average: bool) -> None:
    """Their mean is Keras' own accumulation; their sum a learning rate that is so many times higher."""
    rate = 0.1 if average else 0.2

    def distribute(optimizer: Any) -> Any:
        optimizer.learning_rate = 0.1
        optimizer.gradient_accumulation_steps = None
        return hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=2, average_aggregated_gradients=average
        )

    assert_trained_as_one(
        lambda: keras.optimizers.SGD(rate, gradient_accumulation_steps=2), distribute, run_eagerly=True
    )


@case()
def train_on_batch() -> None:
    alone, together = make_model(), make_model()
    alone.compile(keras.optimizers.Adam(0.01), "mse")
    together.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    (x, y), (all_x, all_y), rows = data_of(hvd.rank()), data_of_all(), BATCH * hvd.size()
    for step in range(STEPS):
        together.train_on_batch(x[step * BATCH :][:BATCH], y[step * BATCH :][:BATCH])
        alone.train_on_batch(all_x[step * rows :][:rows], all_y[step * rows :][:rows])
    assert_close(together, alone)


@case(call=["apply", "apply_gradients"])
def a_loop_of_ones_own(call: str) -> None:
    alone, together = make_model(), make_model()
    plain = keras.optimizers.Adam(0.01)
    distributed = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    (x, y), (all_x, all_y), rows = data_of(hvd.rank()), data_of_all(), BATCH * hvd.size()
    for step in range(STEPS):
        for model, optimizer, batch in (
            (together, distributed, (x[step * BATCH :][:BATCH], y[step * BATCH :][:BATCH])),
            (alone, plain, (all_x[step * rows :][:rows], all_y[step * rows :][:rows])),
        ):
            gradients = gradients_of(model, *batch)
            if call == "apply":
                optimizer.apply(gradients, model.trainable_weights)
            else:
                optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    assert_close(together, alone)
    assert_alike(together.weights)


@case()
def an_optimizer_that_has_been_used() -> None:
    """It keeps its momentum, and is the same object still."""
    model = make_model()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.apply(gradients_of(model, *data_of(0)), model.trainable_weights)
    before = [keras.ops.convert_to_numpy(one) for one in optimizer.variables]
    distributed = hvd.DistributedOptimizer(optimizer)
    assert distributed is optimizer
    assert isinstance(distributed, keras.optimizers.SGD)
    assert type(distributed).__name__ == "SGD"
    for one, value in zip(distributed.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), value)
    distributed.apply(gradients_of(model, *data_of(hvd.rank())))
    assert_alike(model.weights)


@case(least=2)
def some_of_the_ranks() -> None:
    """The ranks of a process set train together, the others for themselves."""
    first = hvd.add_process_set([0])
    try:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=first)
        optimizer.apply(gradients_of(model, *data_of(hvd.rank())), model.trainable_weights)
        plain = make_model()
        keras.optimizers.SGD(0.1).apply(gradients_of(plain, *data_of(hvd.rank())), plain.trainable_weights)
        for expected, found in zip(plain.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(found, expected)
    finally:
        hvd.remove_process_set(first)
