"""The workers of an elastic job, as the arbiter knows them."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from sirtaki.runner.elastic.arbiter.actions import Action, Kill, Slot
from sirtaki.runner.rendezvous.elastic.messages import Enlist, Fence, Standing


class Status(enum.Enum):
    """A worker's part in the job."""

    STARTING = "starting"  # it has not enlisted yet
    ENLISTED = "enlisted"  # it waits for a generation
    MEMBER = "member"  # it belongs to the current generation
    RETURNED = "returned"  # its training function has returned
    ENDED = "ended"  # its process has ended, or was told to


@dataclass
class Worker:
    """A worker.

    Attributes:
        number: never used again.
        slot: its place, for life.
        started: when it was started (time.monotonic()).
        first_generation: the first one that it was a member of; 0 for none.
        rank: in the current generation, or the last one that it was a member of; -1 for none.
        report: its last enlistment.
        checks: its answer to the last question for it; -1 if it has not answered.
        has_received: whether it has the state of the current generation.
        is_draining: whether it leaves at the next change.
        was_asked: whether its process was asked to end (SIGTERM).
        has_slot: whether its slot may still be used.
        is_given_up: whether it was killed by the arbiter.
        is_running: whether its process still runs, perhaps after it was told to end.
    """

    number: int
    slot: Slot
    started: float
    status: Status = Status.STARTING
    first_generation: int = 0
    rank: int = -1
    report: Enlist | None = None
    checks: int = -1
    has_received: bool = False
    is_draining: bool = False
    was_asked: bool = False
    has_slot: bool = True
    is_given_up: bool = False
    is_running: bool = True

    @property
    def is_alive(self) -> bool:
        return self.status is not Status.ENDED

    def answer(self, question: Fence) -> Standing:
        """Returns whether nobody goes on in its place. That of a newcomer counts, too."""
        is_rank = self.is_alive and not self.is_given_up
        return Standing(question.generation, question.question, is_rank)

    @property
    def commit(self) -> int:
        """Returns the number of the last commit that it has reported; -1 for none."""
        return self.report.commit if self.report is not None else -1

    @property
    def can_restore(self) -> bool:
        return self.report is not None and self.report.can_restore and self.commit >= 0

    def give_up(self) -> list[Action]:
        """Returns the orders that give it up: its process is killed, once."""
        is_new, self.is_given_up = not self.is_given_up, True
        return [Kill(self.number)] if is_new else []

    @property
    def name(self) -> str:
        """Formats "rank 2", or "the process in slot localhost:2" for a worker that was never a rank."""
        return f"rank {self.rank}" if self.rank >= 0 else f"the process in slot {self.slot}"


class Workers:
    """All workers so far, by their numbers."""

    def __init__(self) -> None:
        self._all: dict[int, Worker] = {}

    def add(self, slot: Slot, now: float) -> Worker:
        """Returns a new worker."""
        worker = Worker(len(self._all), slot, now)
        self._all[worker.number] = worker
        return worker

    def __getitem__(self, number: int) -> Worker:
        return self._all[number]

    def __contains__(self, number: int) -> bool:
        return number in self._all

    def living(self, *statuses: Status) -> list[Worker]:
        """Returns the workers that have not ended, in the order of their numbers: all, or with a status."""
        return [
            worker
            for worker in self._iterate()
            if worker.is_alive and (not statuses or worker.status in statuses)
        ]

    def all(self) -> list[Worker]:
        return list(self._iterate())

    def give_up_host(self, host: str) -> list[Action]:
        """Returns the orders that give up all workers of a host which have not returned."""
        living = self.living(Status.STARTING, Status.ENLISTED, Status.MEMBER)
        return [order for worker in living if worker.slot.host == host for order in worker.give_up()]

    def may_have_state(self, has_trained: bool) -> bool:
        """Returns whether a worker may have the state of the training, which only members have had."""
        return any(
            worker.status is Status.MEMBER or worker.commit >= 0 or not has_trained
            for worker in self.living(Status.ENLISTED, Status.MEMBER)
        )

    def used_slots(self) -> set[Slot]:
        """Returns the slots in which a process runs, including processes that were told to end."""
        return {worker.slot for worker in self._iterate() if worker.is_running}

    def _iterate(self) -> Iterator[Worker]:
        return iter(self._all.values())
