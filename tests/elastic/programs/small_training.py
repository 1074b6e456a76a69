"""A training so small that one process can replay it bit for bit, from the sizes of its worlds.

Each step deals one sample to each rank, from those that are left. The sum of gradients is that of the direct
all-reduce, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WIDTH = 8
_RATE = np.float32(0.1)


class SmallTraining:
    """A linear regression by stochastic gradient descent, over so many samples."""

    def __init__(self, samples: int) -> None:
        source = np.random.default_rng(7)
        self.samples = samples
        self._x = source.standard_normal((samples, WIDTH)).astype(np.float32)
        self._y = source.standard_normal(samples).astype(np.float32)

    def gradient(self, w: np.ndarray, index: int) -> np.ndarray:
        """Returns the gradient of one sample; zero beyond the last."""
        if index >= self.samples:
            return np.zeros(WIDTH, np.float32)
        return (self._x[index] * (self._x[index] @ w - self._y[index])).astype(np.float32)

    def step(self, w: np.ndarray, total: np.ndarray, count: int) -> np.ndarray:
        """Returns the weights after a step with the sum of `count` gradients."""
        return w - _RATE * total / np.float32(count)

    def replay(self, sizes: Sequence[int]) -> list[float]:
        """Returns the weights after steps in which so many samples were processed each."""
        w, done = np.zeros(WIDTH, np.float32), 0
        for size in sizes:
            total = self.gradient(w, done)
            for index in range(done + 1, done + size):
                total = total + self.gradient(w, index)
            w, done = self.step(w, total, size), done + size
        return [float(value) for value in w]
