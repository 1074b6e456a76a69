"""Trains with `model.fit` on ranks that may be lost, and checks itself against one process.

KERAS_BACKEND chooses the backend, SHARD a division of the optimizer's state. Each step records the samples
of all ranks before its commit.

Usage: keras_training.py SAMPLES EPOCHS
"""

from __future__ import annotations

import os
import sys
from typing import Any

import keras
from replayed import FEATURES, Steps, hold, merge, pace, pause, regression, report, weights

import sirtaki.keras as hvd

SAMPLES, EPOCHS = map(int, sys.argv[1:])
BATCH = 2
keras.config.set_floatx("float64")  # also for the loss
if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)
X, Y = regression(SAMPLES)


def make_model(optimizer: Any) -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(16, activation="tanh"), layers.Dense(1, use_bias=False)]
    )
    model.set_weights(weights((FEATURES, 16), (16,), (16, 1)))
    model.compile(optimizer, "mse")
    return model


def replay(steps: Steps) -> Any:
    """Returns the weights after these steps in one process."""
    model = make_model(keras.optimizers.SGD(0.02, momentum=0.5))
    for _, taken in steps:
        model.train_on_batch(X[taken], Y[taken])
    return model.get_weights()


class Recorder(keras.callbacks.Callback):
    """Records the samples of all ranks in each step."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        state = self._state
        if batch >= state.data.skipped:
            pause()
            own = state.data._deal.units(batch).tolist()
            state.steps = [*state.steps, (state.epoch, merge(hvd.allgather_object(own)))]
            state.step += 1
            pause()


class Pace(keras.callbacks.Callback):
    """Pauses after a commit, and waits for other ranks where a test wants that."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch >= self._state.data.skipped:
            pace(self._state.step)
            hold(self._state, hvd.size)


@hvd.elastic.run
def train(state: Any) -> None:
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        Recorder(state),
        hvd.elastic.CommitStateCallback(state),
        Pace(state),
    ]
    state.model.fit(
        state.data, initial_epoch=state.epoch, epochs=EPOCHS, callbacks=callbacks, shuffle=False, verbose=0
    )


def main() -> None:
    hvd.init()
    optimizer = keras.optimizers.SGD(0.02, momentum=0.5)
    model = make_model(hvd.DistributedOptimizer(optimizer, shard=os.environ.get("SHARD")))
    data = hvd.shard_arrays(X, Y, batch_size=BATCH)
    state = hvd.elastic.KerasState(model, data=data, epoch=0, batch=0, step=0, steps=[])
    train(state)
    report(state.steps, model.get_weights(), replay(state.steps), hvd.size())


if __name__ == "__main__":
    main()
