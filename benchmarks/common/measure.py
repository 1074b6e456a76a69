"""Statistics of repeated measurements, and the clock of a call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

__all__ = ["Interval", "median", "median_interval", "quantile", "timed"]


class Interval(NamedTuple):
    """A median, and the bounds between which that of the population lies with 95 % confidence."""

    median: float
    low: float
    high: float


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which the share `q` of the values lies."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def median_interval(values: Sequence[float]) -> Interval:
    """The median with its interval from order statistics, which assumes nothing about the distribution."""
    ordered = sorted(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low = max(math.floor(count / 2 - reach), 0)
    high = min(math.ceil(count / 2 + reach), count - 1)
    return Interval(median(ordered), ordered[low], ordered[high])


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """How long each of so many calls took, in microseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times
