"""The moment of the first news that makes a generation end, from which the time of a change is counted."""

from __future__ import annotations


class FirstNews:
    """The first news about the current generation.

    A lost worker's host may have been silent before its loss was noticed: the earliest moment counts, in
    whatever order the moments become known.
    """

    def __init__(self) -> None:
        self._moment: float | None = None

    def note(self, moment: float) -> None:
        """Notes news of this moment (time.monotonic())."""
        self._moment = moment if self._moment is None else min(self._moment, moment)

    def take(self) -> float | None:
        """Returns the moment of the first news, None if there was none; begins another generation."""
        moment, self._moment = self._moment, None
        return moment
