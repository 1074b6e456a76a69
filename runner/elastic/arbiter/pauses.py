"""The pauses after failures, for slots, hosts and spares alike."""

from __future__ import annotations

_MOST_DOUBLINGS = 60  # 2 to this power is beyond any limit, and a float


def doubled(shortest: float, longest: float, times: int) -> float:
    """Returns the shortest pause in seconds, doubled `times` times, at most the longest pause."""
    return min(shortest * 2.0 ** min(times, _MOST_DOUBLINGS), longest)
