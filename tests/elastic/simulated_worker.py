"""A worker of a simulated elastic job: the life of a process, from its start through generations to its end.

It follows bindings/bootstrap/elastic/worker.py and adapters/common/elastic/loop.py. Its training is a number
of steps; each has one exchange among all members, and a check: `commit()`, or `check_host_updates()`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sirtaki.bindings.bootstrap.elastic.messages import (
    Change,
    Counted,
    Drain,
    End,
    Enlist,
    LeaveAt,
    Message,
    Over,
    Received,
    Returned,
    World,
)
from sirtaki.runner.elastic.arbiter.model import Slot

if TYPE_CHECKING:
    from elastic.simulation import Simulation


class At(enum.Enum):
    """The place of a worker's program."""

    STARTING = enum.auto()
    ENLISTED = enum.auto()
    LINKING = enum.auto()
    EXCHANGING = enum.auto()  # waits for an exchange
    COMPUTING = enum.auto()
    HELD = enum.auto()  # waits in a check for the arbiter's answer
    RETURNED = enum.auto()
    ENDED = enum.auto()


class SimulatedWorker:
    """A worker. Continuations that were planned before its last turn have no effect."""

    def __init__(self, job: Simulation, number: int, slot: Slot) -> None:
        self.job, self.number, self.slot = job, number, slot
        self.at = At.STARTING
        self.turn = 0  # increases when the program's course changes
        self.generation = 0  # the one that the program takes part in; 0 for none
        self.world: World | None = None
        self.step = self.saved_step = 0
        self.commit = -1
        self.is_dirty = False
        self.checks = self.leave_at = 0
        self.must_wait = False
        self.is_told_to_end = False
        self.failure = ("", -1)  # of its context: kind and culprit
        self.is_stuck = False
        self.is_over = False  # the arbiter has been told of its end

    @property
    def is_running(self) -> bool:
        return self.at is not At.ENDED

    @property
    def can_restore(self) -> bool:
        return self.commit >= 0 and (not self.is_dirty or self.job.keeps_copies)

    def after(self, seconds: float, act: str, *arguments: object) -> None:
        """Continues with a method after this time, unless the program's course has changed."""
        turn = self.turn

        def go_on() -> None:
            if self.turn == turn and self.is_running:
                getattr(self, act)(*arguments)

        self.job.after(seconds, go_on)

    def send(self, message: Message) -> None:
        self.job.send_to_arbiter(self, message)

    # ---- The start, and the wait for a generation ------------------------------------------------------

    def start(self) -> None:
        self.after(self.job.pause(5.0), "enlist", Enlist(0, "new"))

    def enlist(self, message: Enlist) -> None:
        self.turn += 1
        self.at, self.generation, self.world, self.failure = At.ENLISTED, 0, None, ("", -1)
        if self.is_told_to_end:
            self.after(self.job.pause(1.0), "end", 0)
        self.send(message)

    def leave(self, reason: str, kind: str = "", text: str = "", unreachable: Sequence[int] = ()) -> None:
        """Leaves its generation; the others notice the loss of its links."""
        generation, culprit = self.generation, self.failure[1]
        assert reason == "lost" or self.can_restore
        if reason == "lost":
            self.job.note_gone(self, "peer_lost")
        report = Enlist(generation, reason, self.commit, self.can_restore, culprit, kind, text)
        self.enlist(replace(report, unreachable=list(unreachable)))

    # ---- A generation ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Begins to link, as the program notices its next world."""
        world = self.world
        assert world is not None
        if self.is_dirty and self.can_restore:  # only a loss leaves a worker so
            self.step, self.is_dirty = self.saved_step, False
        self.turn += 1
        self.at, self.generation, self.failure = At.LINKING, world.generation, ("", -1)
        self.checks = self.leave_at = 0
        self.must_wait = False
        self.after(10.0, "fail_link")  # its limit
        self.job.link(self)

    def fail_link(self) -> None:
        """Reports that it could not link, and whom it does not reach."""
        unreachable = self.job.unreachable(self.number, self.job.groups[self.generation].members)
        self.leave("lost", "link", "it could not link", unreachable)

    def receive(self, step: int) -> None:
        """Takes the state of the generation's commit."""
        assert self.world is not None
        if self.world.rank in self.world.current:
            assert self.step == step or self.commit < 0, f"worker {self.number} has another state"
        self.step = self.saved_step = step
        self.commit, self.is_dirty = self.world.commit, False
        self.turn += 1
        self.send(Received(self.generation))
        self.at = At.COMPUTING
        self.after(self.job.pause(0.1), "begin_step")

    def begin_step(self) -> None:
        self.turn += 1
        if self.failure[0]:
            self.raise_failure()
        elif self.step == self.job.steps:
            self.at = At.RETURNED
            self.send(Returned(self.generation))
            self.generation = 0
            self.job.note_gone(self, "")
            self.after(self.job.pause(20.0), "end", 0)
        else:
            self.at = At.EXCHANGING
            self.job.exchange(self)

    def finish_exchange(self) -> None:
        self.turn += 1
        self.step, self.is_dirty, self.at = self.step + 1, True, At.COMPUTING
        self.after(self.job.compute_seconds(), "check", self.step % self.job.commit_interval == 0)

    def fail(self, kind: str, culprit: int) -> None:
        """Takes the failure of its context, which the program notices in an exchange or a check."""
        if not self.failure[0] and self.at in (At.LINKING, At.EXCHANGING, At.COMPUTING, At.HELD):
            self.failure = (kind, culprit)
            if self.at is At.EXCHANGING:
                self.raise_failure()
            elif self.at is At.LINKING and self.job.random.random() < 0.5:
                self.leave("lost", kind, "it could not receive the state")
            elif self.at is At.LINKING:
                self.fail_link()

    def raise_failure(self) -> None:
        self.leave("lost", self.failure[0], "a rank was lost")

    # ---- Checks ----------------------------------------------------------------------------------------

    def check(self, is_commit: bool) -> None:
        if is_commit:
            self.save()
        self.checks += 1
        if self.must_wait:
            self.turn += 1
            self.at = At.HELD
            self.after(60.0, "miss_answer")
            return
        self.finish_check(is_commit)

    def miss_answer(self) -> None:
        raise AssertionError(f"worker {self.number} has waited in a check for too long")

    def finish_check(self, is_commit: bool) -> None:
        if self.leave_at == self.checks:
            if not is_commit:
                self.save()
            self.job.note_leave(self)
            self.leave("changed")
            return
        assert not self.leave_at or self.checks < self.leave_at, f"worker {self.number} has missed its check"
        self.at = At.COMPUTING
        self.begin_step()

    def save(self) -> None:
        self.commit += 1
        self.saved_step, self.is_dirty = self.step, False

    # ---- Messages --------------------------------------------------------------------------------------

    def take(self, message: Message) -> None:
        """Takes a message on the connection's thread."""
        if isinstance(message, World):
            assert self.at is At.ENLISTED
            self.world = message
            self.after(self.job.pause(0.05), "enter")
        elif isinstance(message, End):
            self.is_told_to_end = True
            if self.at is At.ENLISTED and self.world is None:
                self.after(self.job.pause(1.0), "end", message.code)
        elif isinstance(message, Change | LeaveAt | Over) and message.generation == self.generation:
            if isinstance(message, Change):
                self.must_wait = True
                self.send(Counted(self.generation, message.question, self.checks))
            elif isinstance(message, LeaveAt):
                self.must_wait, self.leave_at = False, message.check
                self.release()
            else:
                self.must_wait = False
                self.release()

    def release(self) -> None:
        if self.at is At.HELD:
            self.turn += 1
            self.finish_check(self.step % self.job.commit_interval == 0)

    # ---- Faults ----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes SIGTERM: the first asks to leave, if it has connected."""
        self.send(Drain(self.generation))

    def get_stuck(self) -> None:
        """Takes part no more, and lives; the others blame it at last."""
        self.is_stuck = True
        if self.at is At.COMPUTING:
            self.turn += 1

    def end(self, code: int, killed_by: int = 0) -> None:
        if self.is_running:
            kind = "aborted" if code else "peer_lost"
            self.turn += 1
            was, self.at = self.at, At.ENDED
            self.job.note_end(self, was, code, killed_by, kind)
