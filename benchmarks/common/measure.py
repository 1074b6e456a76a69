"""Statistics of repeated measurements, the timing of a call, and measurements in alternating rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median as median
from typing import NamedTuple, TypeVar

# Benchmarks import these from here, beside the functions below.
from sirtaki.runner.bench.samples import block_calls as block_calls
from sirtaki.runner.bench.samples import quantile as quantile
from sirtaki.runner.bench.samples import timed as timed

Result = TypeVar("Result")


class Interval(NamedTuple):
    """A median, and its 95 % confidence bounds for the median of the population."""

    median: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        """Formats each number by itself: `.1f` gives "1.0 (0.9 to 1.2)"."""
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def medians(blocks: Iterable[Sequence[float]]) -> list[float]:
    return [median(block) for block in blocks]


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median and its interval from order statistics, without assumptions on the distribution."""
    ordered = sorted(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low = max(math.floor(count / 2 - reach), 0)
    high = min(math.ceil(count / 2 + reach), count - 1)
    return Interval(median(ordered), ordered[low], ordered[high])


def ratio(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Returns the values as multiples of the baseline, each divided by that of the same round."""
    return median_interval([value / base for value, base in zip(values, baseline, strict=True)])


def difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Returns the excess of the values over the baseline, each over that of the same round."""
    return median_interval([value - base for value, base in zip(values, baseline, strict=True)])


def alternate(measurements: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Makes all measurements once per round, so that changes of the machine's speed affect them alike.

    Returns each one's results by round.
    """
    results: dict[str, list[Result]] = {name: [] for name in measurements}
    for _ in range(rounds):
        for name, measure in measurements.items():
            results[name].append(measure())
    return results
