"""The parameters of all ranks that take local steps, in one process, with numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Arrays = list[NDArray[np.float64]]


class Replicas:
    """Averages, and DiLoCo's outer steps; a subclass takes the local steps.

    Attributes:
        params, momenta: of each rank.
        whole: the parameters after the last exchange.
        outer: the momenta of outer steps.
    """

    def __init__(self, start: Sequence[NDArray[np.float64]], size: int) -> None:
        self.params = [[one.copy() for one in start] for _ in range(size)]
        self.momenta = [[np.zeros_like(one) for one in start] for _ in range(size)]
        self.whole = [one.copy() for one in start]
        self.outer = [np.zeros_like(one) for one in start]

    def average(self, weights: Sequence[float]) -> None:
        self._set(self._means(weights))

    def outer_step(self, weights: Sequence[float]) -> None:
        """Takes a step with Nesterov's momentum and the paper's settings, written out."""
        changes = [whole - mean for whole, mean in zip(self.whole, self._means(weights), strict=True)]
        self.outer = [0.9 * momentum + change for momentum, change in zip(self.outer, changes, strict=True)]
        steps = zip(self.whole, changes, self.outer, strict=True)
        self._set([whole - 0.7 * (change + 0.9 * momentum) for whole, change, momentum in steps])

    def _means(self, weights: Sequence[float]) -> Arrays:
        """Returns the weighted mean of the ranks' parameters."""
        by_place = zip(*self.params, strict=True)
        return [
            sum(own * weight for own, weight in zip(of_ranks, weights, strict=True)) / sum(weights)
            for of_ranks in by_place
        ]

    def _set(self, values: Arrays) -> None:
        self.whole = values
        self.params = [[value.copy() for value in values] for _ in self.params]
