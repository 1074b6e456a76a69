"""Statistics of repeated measurements in blocks of calls; times in microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median


def quantile(values: Sequence[float], q: float) -> float:
    """Returns the value below which the share `q` of the values lies."""
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def median_ratio(values: Iterable[float], baseline: Iterable[float]) -> float:
    """Returns the median of the values, each divided by that of the baseline in the same round."""
    return median(value / base for value, base in zip(values, baseline, strict=True))


def block_calls(size: int, bytes_per_block: int, least: int, most: int) -> int:
    """Returns the number of calls on `size` bytes in a block, which moves `bytes_per_block` if it can."""
    return max(least, min(most, bytes_per_block // max(size, 1)))


def timed(call: Callable[[], object], calls: int) -> list[float]:
    """Returns the duration of each of `calls` calls, in microseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times
