"""Durations, shares and ranks as text, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby


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


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats "ranks 0-3, 6" for ascending ranks."""
    spans = []
    for _, found in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        span = [rank for _, rank in found]
        spans.append(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(spans)}"


def percentile(values: Iterable[float], share: float) -> float:
    """Returns the smallest value that at least `share` of all are not above; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else 0
