"""A rank of benchmarks/keras_step.py: blocks of training steps, by `model.fit` and by loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import sirtaki.keras as hvd
from workers.tensorflow_allreduce import strategy

BATCH, RATE, WARM_UP_STEPS = 16, 1e-3, 3


def make_model(layers: int, width: int) -> Any:
    keras.utils.set_random_seed(0)  # the same on all ranks
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    return keras.Sequential([keras.Input((width,)), *hidden])


class KerasRank:
    """The orders that a rank executes."""

    def __init__(self, _: Path, ports: str) -> None:
        hvd.init()
        tf.config.threading.set_intra_op_parallelism_threads(1)
        self.number, self._workers = hvd.rank(), strategy(ports)
        self._steps: dict[str, Callable[[int], None]] = {}
        self._exchanging: list[Any] = []

    def versions(self) -> dict[str, str]:
        return {"Keras": keras.__version__, "TensorFlow": tf.__version__}

    def prepare(self, layers: int, width: int) -> dict[str, Any]:
        """Makes a model for each kind of step, runs the first steps, and returns the amount to exchange."""
        x = tf.constant(np.random.default_rng(hvd.rank()).normal(size=(BATCH, width)), tf.float32)
        models = [make_model(layers, width) for _ in range(4)]
        self._exchanging = [models[1], models[3]]
        self._steps = {
            "fit alone": fitting(models[0], keras.optimizers.SGD(RATE), x),
            "fit, sirtaki": fitting(models[1], hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)), x),
            "loop alone": looping(models[2], x, None),
            "loop, MWMS": looping(models[3], x, self._workers),
        }
        for steps in self._steps.values():
            steps(WARM_UP_STEPS)
        counts = [int(np.prod(one.shape)) for one in models[0].trainable_weights]
        return {"parameters": sum(counts), "tensors": len(counts), "who": list(self._steps)}

    def block(self, who: str, calls: int) -> list[float]:
        """Runs as many steps as one block; returns milliseconds per step."""
        hvd.barrier()
        start = time.perf_counter()
        self._steps[who](calls)
        return [(time.perf_counter() - start) * 1e3 / calls]

    def deviation(self) -> float:
        """Returns how far the models that exchange are apart, relative to how far training has moved them."""
        start = make_model(len(self._exchanging[0].layers), self._exchanging[0].layers[0].units).get_weights()
        own, other = (
            np.concatenate([one.ravel() for one in each.get_weights()]) for each in self._exchanging
        )
        moved = np.abs(own - np.concatenate([one.ravel() for one in start])).max()
        apart = max(np.abs(own - other).max(), np.abs(own - hvd.broadcast(own, 0)).max())
        return float(apart / moved)


def fitting(model: Any, optimizer: Any, x: tf.Tensor) -> Callable[[int], None]:
    """Returns a call that runs steps of `model.fit`, in one epoch each time."""
    model.compile(optimizer, "mse")
    batches = tf.data.Dataset.from_tensors((x, x)).repeat()
    return lambda steps: model.fit(batches, steps_per_epoch=steps, verbose=0)


def looping(
    model: Any, x: tf.Tensor, workers: tf.distribute.MultiWorkerMirroredStrategy | None
) -> Callable[[int], None]:
    """Returns a call that runs steps of a tf.function; the strategy, if given, sums the gradients."""
    variables = [variable.value for variable in model.trainable_weights]

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - x))
        gradients = tape.gradient(loss, variables)
        if workers is not None:
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(RATE * gradient)

    function = tf.function(step if workers is None else lambda: workers.run(step))

    def steps(count: int) -> None:
        for _ in range(count):
            function()

    return steps
