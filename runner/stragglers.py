"""Tells of ranks that still run when the others have ended in good order: one may be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sirtaki._core.bootstrap.rounds import name_ranks

FIRST_SECONDS = 30.0
_FACTOR = 10  # then rarely: the last rank may have work of its own for hours


class Stragglers:
    """Says which ranks still run, a while after another one has ended last. `say` is given the line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since = 0.0
        self._pause = FIRST_SECONDS
        self.due: float | None = None  # when there is something to say next (time.monotonic())

    def note_ending(self) -> None:
        """A rank has ended in good order."""
        self._since = time.monotonic()
        self._pause = FIRST_SECONDS
        self.due = self._since + self._pause

    def end(self) -> None:
        """The job has failed, or all ranks have ended."""
        self.due = None

    def meet(self, now: float, running: Sequence[int]) -> None:
        """Says what is due."""
        if self.due is None or now < self.due or not running:
            return
        runs = "runs" if len(running) == 1 else "run"
        self._say(
            f"{name_ranks(tuple(running))} still {runs}; the others ended {now - self._since:.0f} s ago"
        )
        self._pause *= _FACTOR
        self.due = self._since + self._pause
