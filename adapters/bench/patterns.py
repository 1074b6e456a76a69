"""Inputs of measured operations, and the comparison of each element of a result with its expected value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirtaki.runner.bench.operations import BenchOperation

Array = NDArray[Any]
_SUMMED = 4  # values from 0 to 3: float16 holds their sums over 600 ranks exactly
_MOVED = 101  # every value fits into int8


class Patterns:
    """The input of each rank, which depends on the rank and on the element's position."""

    def __init__(self, operation: BenchOperation, dtype: str, ranks: int) -> None:
        self._operation, self._ranks = operation, ranks
        self._dtype = np.dtype(dtype)
        self._values = _SUMMED if operation.reduces else _MOVED

    def input(self, count: int, rank: int) -> Array:
        """Returns a rank's input, in parts of `count` elements."""
        return self._slice(rank, 0, self._operation.input_count(count, self._ranks))

    def count_wrong(self, result: Array, count: int, rank: int) -> int:
        """Returns how many elements of a rank's result are wrong; elements that it lacks are."""
        expected_count = self._operation.output_count(count, self._ranks)
        flat = result.reshape(-1)
        if flat.size != expected_count or flat.dtype != self._dtype:
            return max(expected_count, 1)
        begin = rank * count if self._operation.parts_in else 0
        if self._operation.reduces:
            return _differing(flat, self._sum(begin, count))
        if not self._operation.parts_out:
            return _differing(flat, self._slice(self._operation.root, begin, count))
        parts = enumerate(flat.reshape(self._ranks, -1))
        return sum(_differing(part, self._slice(owner, begin, count)) for owner, part in parts)

    def _slice(self, rank: int, begin: int, count: int) -> Array:
        """Returns `count` elements of a rank's input, from element `begin` on."""
        period = (np.arange(self._values) + rank + begin) % self._values
        return np.resize(period.astype(self._dtype), count)

    def _sum(self, begin: int, count: int) -> Array:
        total = np.zeros(count, self._dtype)
        for owner in range(self._ranks):
            total += self._slice(owner, begin, count)
        return total


def _differing(result: Array, expected: Array) -> int:
    return int(np.count_nonzero(result != expected))
