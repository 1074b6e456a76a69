"""Statistics of repeated measurements, and the timing of a call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

__all__ = ["Interval", "median", "median_interval", "quantile", "timed"]


class Interval(NamedTuple):
    """A median, and its 95 % confidence bounds for the median of the population."""

    median: float
    low: float
    high: float


def quantile(values: Sequence[float], q: float) -> float:
    """Returns the value below which the share `q` of the values lies."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median and its interval from order statistics, without assumptions on the distribution."""
    ordered = sorted(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low = max(math.floor(count / 2 - reach), 0)
    high = min(math.ceil(count / 2 + reach), count - 1)
    return Interval(median(ordered), ordered[low], ordered[high])


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Returns the duration of each of `calls` calls, in microseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times
