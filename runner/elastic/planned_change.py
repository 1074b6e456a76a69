"""A planned change: finds the check at which all members leave their generation.

Each member answers with the number of checks that it has begun, and waits in its next one. The check after
the highest number is therefore one that no member has passed, and that all can reach.
"""

from __future__ import annotations

from collections.abc import Sequence

from sirtaki.runner.elastic.actions import Action, Send
from sirtaki.runner.elastic.workers import Status, Worker
from sirtaki.runner.rendezvous.elastic.messages import Change, LeaveAt

_SETTLE_SECONDS = 0.5  # after the first new worker: others that were started with it join in the same change


class PlannedChange:
    """The planned change of one generation."""

    def __init__(self) -> None:
        self.is_asked = False
        self.due: float | None = None  # when to ask (time.monotonic())
        self._members: Sequence[Worker] = ()

    def advance(
        self, generation: int, members: Sequence[Worker], joiners: Sequence[Worker], now: float
    ) -> list[Action]:
        """Asks the members if a worker can join, or wants to leave. Returns the orders."""
        if self.is_asked:
            return []
        present = [one for one in members if one.status is Status.MEMBER]
        stays = bool(joiners) or any(not one.is_draining for one in present)
        leaves = stays and any(one.is_draining for one in present)
        if not joiners and not leaves:
            self.due = None
            return []
        if self.due is None:
            self.due = now + _SETTLE_SECONDS
        if self.due > now and not leaves:
            return []
        self.is_asked, self.due, self._members = True, None, members
        for one in members:
            one.checks = -1
        return [Send(one.number, Change(generation)) for one in members]

    def note_count(self, worker: Worker, checks: int, generation: int) -> list[Action]:
        """Takes a member's answer; returns the orders once all have answered."""
        worker.checks = checks
        if not self.is_asked or any(one.checks < 0 for one in self._members):
            return []
        leave_at = LeaveAt(generation, 1 + max(one.checks for one in self._members))
        return [Send(one.number, leave_at) for one in self._members]
