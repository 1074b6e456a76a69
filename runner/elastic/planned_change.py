"""A planned change: finds the check at which all members leave their generation.

Each member answers with the number of checks that it has begun, and waits in its next one. The check after
the highest number is therefore one that no member has passed, and that all can reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sirtaki.runner.elastic.actions import Action, Send
from sirtaki.runner.elastic.workers import Status, Worker
from sirtaki.runner.rendezvous.elastic.messages import Change, Counted, LeaveAt

_SETTLE_SECONDS = 0.5  # after the first new worker: others that were started with it join in the same change
_ANSWER_SECONDS = (
    30.0  # a member whose program holds Python's lock for longer delays the change, and nothing else
)


class PlannedChange:
    """The planned change of one generation."""

    def __init__(self) -> None:
        self.is_asked = False
        self.asked_at = math.inf  # when the members were last asked (time.monotonic())
        self.due: float | None = None  # when to ask, or to ask again (time.monotonic())
        self._question = 0
        self._is_agreed = False
        self._members: Sequence[Worker] = ()

    def advance(
        self,
        generation: int,
        members: Sequence[Worker],
        joiners: Sequence[Worker],
        now: float,
        awaits_more: bool = True,
    ) -> list[Action]:
        """Asks the members if a worker can join, or wants to leave. Returns the orders.

        `awaits_more`: other workers are starting, which may join in the same change.

        If not all have answered for a while, those that wait in a check go on, and all are asked again.
        """
        if self._is_agreed:
            return []
        if self.is_asked:
            if self.due is None or now < self.due:
                return []
            self.is_asked, self.due = False, now + _ANSWER_SECONDS
            return [Send(member.number, LeaveAt(generation, 0)) for member in members]
        present = [member for member in members if member.status is Status.MEMBER]
        stays = bool(joiners) or any(not one.is_draining for one in present)
        leaves = stays and any(one.is_draining for one in present)
        if not joiners and not leaves:
            self.due = None
            return []
        if self.due is None:
            self.due = now + _SETTLE_SECONDS
        is_complete = leaves or not awaits_more
        if self.due > now and not (is_complete and self._question == 0):
            return []
        self.is_asked, self.due, self._members = True, now + _ANSWER_SECONDS, members
        self.asked_at = now
        self._question += 1
        for one in members:
            one.checks = -1
        return [Send(member.number, Change(generation, self._question)) for member in members]

    def note_count(self, worker: Worker, answer: Counted) -> list[Action]:
        """Takes a member's answer; returns the orders once all have answered."""
        if not self.is_asked or answer.question != self._question:
            return []
        worker.checks = answer.checks
        if any(member.checks < 0 for member in self._members):
            return []
        self._is_agreed, self.due = True, None
        leave_at = LeaveAt(answer.generation, 1 + max(member.checks for member in self._members))
        return [Send(member.number, leave_at) for member in self._members]
