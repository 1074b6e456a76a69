"""Durations and shares as text, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable


def time(nanoseconds: float) -> str:
    """Formats a duration with three digits, in the unit that suits it."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(nanoseconds) >= 0.9995 * size:
            value = nanoseconds / size
            digits = max(2 - int(math.log10(max(abs(value), 1))), 0)
            return f"{value:.{digits}f} {unit}"
    return f"{nanoseconds:.0f} ns"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def percentile(values: Iterable[float], share: float) -> float:
    """Returns the smallest value that at least `share` of all are not above; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else 0
