"""The arbiter's waits, which tell the user for what, and end."""

from __future__ import annotations

from collections.abc import Sequence

from sirtaki.runner.elastic.actions import Action, Say
from sirtaki.runner.elastic.workers import Worker

_TELL_SECONDS = 10.0


class Wait:
    """A wait of the arbiter before it can form a generation."""

    def __init__(self, timeout: float, patience: float, option: str) -> None:
        """`option` is how the user calls the timeout."""
        self._timeout, self._patience, self._option = timeout, patience, option
        self._subject = ""  # a wait for something else begins anew
        self._since = 0.0
        self._is_told = False
        self.due: float | None = None  # when the wait has news (time.monotonic())

    def end(self) -> None:
        self._subject, self.due = "", None

    def is_too_long(self, now: float) -> bool:
        """Returns whether enough workers for the start have been awaited for too long."""
        return self._subject == "workers" and now >= self._since + self._timeout

    def for_members(self, awaited: Sequence[Worker], now: float) -> list[Action]:
        """Waits for members that live, and have not left their generation; at last, gives them up."""
        names = ", ".join(one.name for one in awaited)
        if self._is_over("members", self._patience, now):
            kills = [order for one in awaited for order in one.give_up()]
            late = "has not noticed that the ranks change, or not returned to its commit"
            what = f"{names} {late}, for {self._patience:g} s: it is given up"
            return [Say(what), *kills] if kills else []
        what = f"waiting for {names} to notice that the ranks change, or to return to its commit"
        return self._tell(what, self._patience, now)

    def for_workers(self, present: int, wanted: int, now: float) -> tuple[list[Action], str]:
        """Waits for more workers; returns orders, and why the job ends if it has taken too long."""
        ranks = "1 rank is" if wanted == 1 else f"{wanted} ranks are"
        if self._is_over("workers", self._timeout, now):
            there = f"{present} {'was' if present == 1 else 'were'} there"
            return [], f"{ranks} needed, and {there} after {self._timeout:g} s"
        limit = f"up to {self._timeout:g} s ({self._option})"
        here = f"{present} {'is' if present == 1 else 'are'} here"
        return self._tell(f"{ranks} needed, and {here}: waiting for more, {limit}", self._timeout, now), ""

    def _is_over(self, subject: str, limit: float, now: float) -> bool:
        """Begins the wait if it has not begun; returns whether it has taken `limit` seconds."""
        if self._subject != subject:
            self._subject, self._since, self._is_told = subject, now, False
            self.due = now + min(_TELL_SECONDS, limit)
        if now < self._since + limit:
            return False
        self.due = None
        return True

    def _tell(self, text: str, limit: float, now: float) -> list[Action]:
        """Returns the order to show for what is waited, once, when it is due."""
        if self._is_told or now < self._since + _TELL_SECONDS:
            return []
        self._is_told, self.due = True, self._since + limit
        return [Say(text)]
