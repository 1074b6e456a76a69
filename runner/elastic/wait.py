"""The arbiter's waits, which tell the user for what, and end."""

from __future__ import annotations

from collections.abc import Sequence

from sirtaki.runner.elastic.actions import Action, Kill, Say
from sirtaki.runner.elastic.workers import Worker

_TELL_SECONDS = 10.0


class Wait:
    """A wait of the arbiter before it can form a generation."""

    def __init__(self, timeout: float, patience: float) -> None:
        self._timeout, self._patience = timeout, patience
        self._since: float | None = None
        self._is_told = False
        self.due: float | None = None  # when the wait has news (time.monotonic())

    def begin(self, now: float) -> None:
        """Begins the wait, unless it has begun."""
        if self._since is None:
            self._since, self._is_told = now, False

    def end(self) -> None:
        self._since = self.due = None

    def is_too_long(self, now: float) -> bool:
        """Returns whether enough workers for the start have been awaited for too long."""
        return self._since is not None and now >= self._since + self._timeout

    def for_members(self, awaited: Sequence[Worker], now: float) -> list[Action]:
        """Waits for members that live, and have not left their generation; at last, gives them up."""
        names = ", ".join(one.name for one in awaited)
        if self._is_over(self._patience, now):
            self.due = None
            late = [one for one in awaited if not one.is_given_up]
            for one in late:
                one.is_given_up = True
            what = f"{names} has not noticed for {self._patience:g} s that the ranks change: it is given up"
            return [Say(what), *(Kill(one.number) for one in late)] if late else []
        return self._tell(f"waiting for {names} to notice that the ranks change", now)

    def for_workers(self, present: int, wanted: int, now: float) -> tuple[list[Action], str]:
        """Waits for more workers; returns orders, and why the job ends if it has taken too long."""
        ranks = "1 rank is" if wanted == 1 else f"{wanted} ranks are"
        if self._is_over(self._timeout, now):
            return [], f"{ranks} needed, and {present} were there after {self._timeout:g} s"
        return self._tell(f"{ranks} needed, and {present} are here: waiting for more", now), ""

    def _is_over(self, limit: float, now: float) -> bool:
        """Begins the wait if it has not begun; returns whether it has taken longer than `limit` seconds."""
        self.begin(now)
        started = now if self._since is None else self._since
        self.due = started + (limit if self._is_told else min(_TELL_SECONDS, limit))
        return now >= started + limit

    def _tell(self, text: str, now: float) -> list[Action]:
        """Returns the order to show for what is waited, once, when it is due."""
        if self._is_told or self.due is None or now < self.due:
            return []
        self._is_told = True
        return [Say(text)]
