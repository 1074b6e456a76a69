"""Reports ranks that still run after the others have ended normally: one may be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sirtaki.runner.rendezvous.rendezvous_state import name_ranks

FIRST_SECONDS = 30.0
_FACTOR = 10  # later reports are rare: the last rank may have hours of work of its own


class Stragglers:
    """A timer that reports ranks which still run long after others have ended. `say` receives the line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since = 0.0
        self._pause = FIRST_SECONDS
        self.due: float | None = None  # when the next report is due (time.monotonic())

    def note_exit(self) -> None:
        """Records that a rank has ended normally."""
        self._since = time.monotonic()
        self._pause = FIRST_SECONDS
        self.due = self._since + self._pause

    def end(self) -> None:
        """Stops reporting: the job has failed, or all ranks have ended."""
        self.due = None

    def poll(self, now: float, running: Sequence[int]) -> None:
        """Reports the running ranks if a report is due."""
        if self.due is None or now < self.due or not running:
            return
        runs = "runs" if len(running) == 1 else "run"
        self._say(f"{name_ranks(running)} still {runs}; the others ended {now - self._since:.0f} s ago")
        self._pause *= _FACTOR
        self.due = self._since + self._pause
