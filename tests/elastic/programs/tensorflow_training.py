"""Trains a small network with TensorFlow on ranks that may be lost, and checks itself against one process.

Usage: tensorflow_training.py SAMPLES EPOCHS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from replayed import (
    FEATURES,
    Steps,
    equal_parts,
    hold,
    merge,
    next_samples,
    own_part,
    pace,
    pause,
    regression,
    report,
    weights,
)

import sirtaki.tensorflow as hvd

SAMPLES, EPOCHS = map(int, sys.argv[1:])
X, Y = regression(SAMPLES)


class Network:
    """A network and its optimizer with momentum, whose step is a compiled function."""

    def __init__(self, wrap: Callable[[Any], Any] = lambda tape: tape) -> None:
        """Creates it; `wrap` makes a tape one that averages over the ranks."""
        self.weights = [tf.Variable(one) for one in weights((FEATURES, 16), (16,), (16, 1))]
        self.velocities = [tf.Variable(tf.zeros_like(one)) for one in self.weights]
        self._wrap = wrap
        rows = [tf.TensorSpec([None, columns], tf.float64) for columns in (FEATURES, 1)]
        signature = [*rows, tf.TensorSpec([None], tf.float64)]
        self._compiled = tf.function(self._step, input_signature=signature)

    def step(self, rows: list[int], parts: list[float]) -> None:
        """Takes a step with these samples, which have these weights."""
        self._compiled(tf.constant(X[rows]), tf.constant(Y[rows]), tf.constant(parts, tf.float64))

    def _step(self, x: Any, y: Any, parts: Any) -> None:
        w, b, v = self.weights
        with self._wrap(tf.GradientTape()) as tape:
            errors = tf.tanh(x @ w + b) @ v - y
            loss = tf.reduce_sum(parts * errors[:, 0] ** 2)
        gradients = tape.gradient(loss, self.weights)
        for weight, velocity, gradient in zip(self.weights, self.velocities, gradients, strict=True):
            velocity.assign(0.5 * velocity + gradient)
            weight.assign_sub(0.02 * velocity)


def replay(steps: Steps) -> list[Any]:
    """Returns the weights after these steps in one process."""
    network = Network()
    for _, taken in steps:
        network.step(*equal_parts(taken))
    return network.weights


@hvd.elastic.run
def train(state: Any, network: Network) -> None:
    while True:
        hold(state, hvd.size)
        epoch, taken = next_samples(state.steps, SAMPLES, hvd.size())
        if epoch == EPOCHS:
            return
        rows, parts = own_part(taken, hvd.rank(), hvd.size())
        network.step(rows, parts)
        pause()
        state.steps = [*state.steps, (epoch, merge(hvd.allgather_object(rows if any(parts) else [])))]
        state.step += 1
        pause()
        state.commit()
        pace(state.step)


def main() -> None:
    hvd.init()
    network = Network(hvd.DistributedGradientTape)
    state = hvd.elastic.TensorFlowState([*network.weights, *network.velocities], step=0, steps=[])
    train(state, network)
    report(state.steps, network.weights, replay(state.steps), hvd.size())


if __name__ == "__main__":
    main()
