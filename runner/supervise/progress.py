"""Shows which peers are present and which are missing: a line, refreshed on a terminal, else repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from sirtaki.bindings.bootstrap.job import join_names

FIRST_REFRESH_SECONDS = 1.0  # a shorter wait needs no line
FIRST_REPEAT_SECONDS = 5.0


class Progress:
    """A wait for each of `names`, by their keys. On a terminal the line is refreshed, elsewhere repeated
    at doubling intervals. `show` receives the line, and "" when the line has to disappear.
    """

    def __init__(
        self, what: str, names: Mapping[int, str], show: Callable[[str], None], refreshes: bool
    ) -> None:
        self._what = what
        self._names = names
        self._show = show
        self._refreshes = refreshes
        self._missing = set(names)
        self._pause = FIRST_REFRESH_SECONDS if refreshes else FIRST_REPEAT_SECONDS
        self._shown = False
        self.due: float | None = None  # when to show the next line (time.monotonic())

    def begin(self) -> None:
        """Starts the wait; does nothing if it has started, or if nothing is awaited."""
        if self.due is None and self._missing:
            self.due = time.monotonic() + self._pause

    def note(self, key: int) -> None:
        """Records that the peer with this key is present."""
        if key not in self._missing:
            return
        self._missing.discard(key)
        if not self._missing:
            self.end()
        elif self._refreshes and self._shown:
            self._show(self.line)

    def poll(self, now: float) -> None:
        """Shows the line if it is due."""
        if self.due is not None and self.due <= now:
            self._show(self.line)
            self._shown = True
            self._pause *= 2
            self.due = now + self._pause

    def end(self) -> None:
        """Ends the wait."""
        self._missing = set()
        self.due = None
        if self._shown and self._refreshes:
            self._show("")
        self._shown = False

    @property
    def line(self) -> str:
        """Formats "7 of 8 ranks are here; waiting for rank 3 (hostB)"."""
        present = len(self._names) - len(self._missing)
        awaited = join_names(self._names[key] for key in sorted(self._missing))
        return f"{present} of {len(self._names)} {self._what}; waiting for {awaited}"
