"""Carries out the arbiter's orders: the part of an elastic job that is the same whatever starts its workers.

hvdrun starts processes, and the executor of Ray actors. Both own a driver, and tell it what happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from sirtaki.bindings.bootstrap.elastic.messages import End, Message
from sirtaki.bindings.bootstrap.job import RendezvousError
from sirtaki.runner.elastic.arbiter.arbiter import Arbiter
from sirtaki.runner.elastic.arbiter.model import (
    Action,
    Close,
    Finish,
    Kill,
    Open,
    Phase,
    Rules,
    Say,
    Send,
    Slot,
    Start,
)
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.launch.errors import CannotStart

_END_SECONDS = 30.0  # for a worker that was told to end, and may have files to write


class Starter(Protocol):
    """A way to start and end workers. Its owner reports their ends."""

    def start(self, worker: int, slot: Slot) -> None:
        """Starts a worker in a slot. Raises CannotStart."""

    def kill(self, worker: int) -> None:
        """Kills a worker; nothing happens if it has ended."""


@dataclass(frozen=True)
class WorkerEnd:
    """The end of a worker: its exit code, or the signal that killed it (else 0), in numbers and in words.

    `since` is the moment since when it has been known to be gone (time.monotonic()), if it has failed.
    `keeps_slot`: whether another worker may be started in its slot.
    """

    code: int
    killed_by: int
    why: str
    since: float
    keeps_slot: bool = True

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.killed_by != 0


class Driver:
    """A job's arbiter, with all that its orders need.

    Attributes:
        arbiter: for questions; whatever happens is told to the driver.
        result: the result of the job, once it is known. Workers may still run.
    """

    def __init__(
        self,
        rules: Rules,
        post: Post,
        starter: Starter,
        say: Callable[[str], None],
        on_finish: Callable[[Finish], None],
        spares: Container[str] = (),
    ) -> None:
        """Creates the arbiter. `on_finish` receives the result, `say` the lines for the user."""
        self.arbiter = Arbiter(rules, (), spares)
        self.result: Finish | None = None
        self._post = post
        self._starter = starter
        self._say = say
        self._on_finish = on_finish
        self._ends: dict[int, float] = {}  # when to kill workers that were told to end
        self._started = time.monotonic()

    def set_slots(self, slots: Sequence[Slot]) -> None:
        """Sets the slots that may be used."""
        self._carry_out(self.arbiter.set_slots(slots, time.monotonic()))

    def receive(self, worker: int, message: Message) -> None:
        """Handles a worker's message."""
        self._carry_out(self.arbiter.received(worker, message, time.monotonic()))

    def note_end(self, worker: int, end: WorkerEnd) -> None:
        """Handles the end of a worker, after its last message."""
        self._ends.pop(worker, None)
        if end.failed:
            self.arbiter.gone_since(worker, end.since)
        now = time.monotonic()
        self._carry_out(self.arbiter.ended(worker, end.code, end.killed_by, end.why, now, end.keeps_slot))

    def advance(self, now: float) -> None:
        """Performs all due actions, including the kill of workers that did not end in time."""
        if (due := self.arbiter.due) is not None and due <= now:
            self._carry_out(self.arbiter.tick(now))
        for worker in [number for number, due in self._ends.items() if due <= now]:
            del self._ends[worker]
            self._starter.kill(worker)

    @property
    def due(self) -> float | None:
        """Returns when to call `advance`, whatever happens (time.monotonic())."""
        moments = [self.arbiter.due, *self._ends.values()]
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def is_over(self) -> bool:
        """Returns whether the result is known. Workers may still run."""
        return self.arbiter.phase is Phase.OVER

    def stop(self, result: Finish) -> None:
        """Ends the job although the arbiter has not decided that."""
        self._carry_out(self.arbiter.stop())
        self._finish(result)

    def last_ranks(self) -> dict[int, int]:
        """Returns the last rank of each worker that has had a rank."""
        return {worker.number: worker.rank for worker in self.arbiter.workers.all() if worker.rank >= 0}

    def summary(self) -> str:
        """Returns a line about the changes of the job; "" if there were none."""
        arbiter = self.arbiter
        if arbiter.generation <= 1 and not arbiter.losses:
            return ""
        seconds, workers = time.monotonic() - self._started, arbiter.workers.all()
        return arbiter.account.summary(arbiter.generation, arbiter.losses, workers, seconds)

    def _carry_out(self, orders: Sequence[Action]) -> None:
        for order in orders:
            if isinstance(order, Say):
                self._say(order.text)
            elif isinstance(order, Send):
                self._post.send(order.worker, order.message)
                if isinstance(order.message, End):
                    self._ends[order.worker] = time.monotonic() + _END_SECONDS
            elif isinstance(order, Open):
                self._open(order)
            elif isinstance(order, Close):
                self._post.close_generation()
            elif isinstance(order, Start) and self.result is None:
                self._start(order)
            elif isinstance(order, Kill):
                self._starter.kill(order.worker)
            elif isinstance(order, Finish):
                self._finish(order)

    def _open(self, order: Open) -> None:
        try:
            self._post.open(order)
        except RendezvousError as error:
            self.stop(Finish(1, f"the ranks cannot meet: {error}"))

    def _start(self, order: Start) -> None:
        try:
            self._starter.start(order.worker, order.slot)
        except CannotStart as error:
            now = time.monotonic()
            self._carry_out(self.arbiter.ended(order.worker, error.exit_code, 0, str(error), now))

    def _finish(self, result: Finish) -> None:
        if self.result is None:
            self.result = result
            self._on_finish(result)
