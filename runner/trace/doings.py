"""Reasons why a rank was late: what its program did while the other ranks waited for it.

The core writes slices of both beside the operations; those of one kind never overlap. A pause is named as its
track, and a line is not.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from sirtaki.runner.trace.formats import percent

_LEAST_SHARE = 0.25  # of the time: what took less is no reason


class Window(NamedTuple):
    """A time, in nanoseconds of the host's monotonic clock."""

    begin: int
    end: int


class Doing(NamedTuple):
    """A pause or a line, and its share of the windows."""

    what: str
    share: float
    is_pause: bool


class Slices:
    """The times of a pause or of a line, in order."""

    def __init__(self, what: str, is_pause: bool) -> None:
        self.what, self.is_pause = what, is_pause
        self._begins, self._ends = array("q"), array("q")

    def append(self, begin: int, end: int) -> None:
        """Adds a slice. Raises OverflowError for times that the core does not write."""
        if self._ends and begin < self._ends[-1]:
            raise OverflowError("slices of a kind do not overlap")
        self._begins.append(begin)
        self._ends.append(end)

    def within(self, window: Window) -> int:
        """Returns how many nanoseconds of a window the slices have."""
        total, at = 0, bisect_right(self._ends, window.begin)
        while at < len(self._begins) and self._begins[at] < window.end:
            total += min(self._ends[at], window.end) - max(self._begins[at], window.begin)
            at += 1
        return total


def doings(slices: Sequence[Slices], windows: Sequence[Window]) -> list[Doing]:
    """Returns the pauses that matter in these windows, the longest first, then the line that does most."""
    whole = sum(window.end - window.begin for window in windows)
    found = [_doing(kind, windows, whole) for kind in slices] if whole else []
    found = sorted((doing for doing in found if doing.share >= _LEAST_SHARE), key=lambda doing: -doing.share)
    lines = [doing for doing in found if not doing.is_pause]
    return [*(doing for doing in found if doing.is_pause), *lines[:1]]


def _doing(slices: Slices, windows: Sequence[Window], whole: int) -> Doing:
    share = sum(map(slices.within, windows)) / whole
    return Doing(slices.what, share, slices.is_pause)


def as_text(found: Sequence[Doing]) -> str:
    """Formats "garbage collection 96 %, at train.py:9 98 %"."""
    return ", ".join(f"{doing.what} {percent(doing.share)}" for doing in found)
