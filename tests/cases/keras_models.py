"""A small Keras model, data for each rank, and its training, for the cases about Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import sirtaki.keras as hvd

STEPS = 4
BATCH = 3  # samples per rank and step


def make_model(seed: int = 0, dtype: str = "float64") -> Any:
    """Returns a model of two layers, with the weights of a seed."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh", dtype=dtype),
            keras.layers.Dense(1, dtype=dtype),
        ]
    )
    generator = np.random.default_rng(seed)
    model.set_weights([generator.normal(size=one.shape) for one in model.get_weights()])
    return model


def data_of(rank: int) -> tuple[Any, Any]:
    """Returns a rank's samples: its batch of step 0, then that of step 1, and so on."""
    generator = np.random.default_rng(100 + rank)
    x = generator.normal(size=(STEPS * BATCH, 3))
    return x, np.sin(x.sum(axis=1, keepdims=True)) * 3


def data_of_all() -> tuple[Any, Any]:
    """Returns all ranks' samples: their batches of step 0, then those of step 1, and so on."""
    parts = [data_of(rank) for rank in range(hvd.size())]
    both = [np.stack([part[which].reshape(STEPS, BATCH, -1) for part in parts], axis=1) for which in (0, 1)]
    return both[0].reshape(-1, 3), both[1].reshape(-1, 1)


def fit(optimizer: Any, data: tuple[Any, Any], batch_size: int, **options: Any) -> Any:
    """Returns a model trained for one epoch."""
    model = make_model()
    model.compile(optimizer, "mse", **options)
    model.fit(*data, batch_size=batch_size, shuffle=False, verbose=0)
    return model


def assert_trained_as_one(
    make: Callable[[], Any], distribute: Callable[[Any], Any] = hvd.DistributedOptimizer, **options: Any
) -> None:
    """Checks that the ranks' training equals one process' training with the batches of all."""
    alone = fit(make(), data_of_all(), BATCH * hvd.size(), **options)
    together = fit(distribute(make()), data_of(hvd.rank()), BATCH, **options)
    assert_close(together, alone)
    assert not np.allclose(alone.get_weights()[0], make_model().get_weights()[0])


def assert_close(model: Any, expected: Any) -> None:
    """Checks that two models have equal weights. Keras computes losses in float32 for every layer dtype."""
    for found, one in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-6)


def gradients_of(model: Any, x: Any, y: Any) -> list[Any]:
    """Returns the gradients of the mean squared error, computed as in a user's own loop."""
    x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
    if keras.backend.backend() == "torch":
        model.zero_grad()
        keras.ops.mean((model(x) - y) ** 2).backward()
        return [variable.value.grad for variable in model.trainable_weights]
    if keras.backend.backend() == "jax":
        import jax

        def loss_of(values: Any) -> Any:
            return keras.ops.mean((model.stateless_call(values, [], x)[0] - y) ** 2)

        return jax.grad(loss_of)([variable.value for variable in model.trainable_weights])
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = keras.ops.mean((model(x) - y) ** 2)
    return tape.gradient(loss, model.trainable_weights)


def assert_alike(variables: list[Any]) -> None:
    """Checks that all ranks have the same values."""
    for variable in variables:
        mine = keras.ops.convert_to_numpy(variable).reshape(1, -1)
        everyone = hvd.allgather(mine)
        assert (everyone == everyone[0]).all(), variable.path


def values_of(variables: list[Any]) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]
