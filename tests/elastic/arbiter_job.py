"""An elastic job for the tests of single rules of the arbiter: events in, orders out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sirtaki.bindings.bootstrap.elastic.messages import Enlist, Message, Received, World
from sirtaki.runner.elastic.arbiter.arbiter import Arbiter
from sirtaki.runner.elastic.arbiter.model import Action, Finish, Open, Phase, Rules, Say, Slot


class Job:
    """A job whose clock stands still but for `at` and `ticks`. Its methods return the orders, without Say.

    `slots` are the slots, or their number on this host.
    """

    def __init__(self, start: int = 2, slots: int | Sequence[Slot] = 2, **rules: Any) -> None:
        own = [Slot("localhost", index) for index in range(slots)] if isinstance(slots, int) else slots
        self.slots = list(own)
        given = {"minimum": 1, "maximum": len(self.slots), **rules}
        self.arbiter = Arbiter(Rules(start=start, **given), self.slots)
        self.now = 0.0
        self.said: list[str] = []
        self.started = self._kept(self.arbiter.tick(0.0))

    def at(self, now: float) -> Job:
        self.now = now
        return self

    def _kept(self, orders: Sequence[Action]) -> list[Action]:
        self.said += [one.text for one in orders if isinstance(one, Say)]
        return [one for one in orders if not isinstance(one, Say)]

    def receives(self, worker: int, message: Message) -> list[Action]:
        return self._kept(self.arbiter.received(worker, message, self.now))

    def loses(self, worker: int) -> list[Action]:
        return self._kept(self.arbiter.ended(worker, 0, 9, "killed by signal 9", self.now))

    def sees_exit(self, worker: int, code: int = 0) -> list[Action]:
        why = f"failed with exit code {code}" if code else "ended"
        return self._kept(self.arbiter.ended(worker, code, 0, why, self.now))

    def sets_slots(self, slots: Sequence[Slot]) -> list[Action]:
        return self._kept(self.arbiter.set_slots(slots, self.now))

    def ticks(self, now: float) -> list[Action]:
        return self._kept(self.at(now).arbiter.tick(now))

    def enlists_new(self, *workers: int) -> list[Action]:
        """Returns the orders after the last of these new workers has enlisted."""
        return [self.receives(one, Enlist(0, "new")) for one in workers][-1]

    def receives_all(self, *workers: int) -> list[Action]:
        generation = self.arbiter.generation
        return [order for one in workers for order in self.receives(one, Received(generation))]

    def trains(self) -> Job:
        """Brings the job to its first generation, of workers 0 to start - 1."""
        workers = range(len(self.started))
        self.enlists_new(*workers)
        self.receives_all(*workers)
        assert self.arbiter.phase is Phase.RUNNING
        return self

    def leaves(
        self, worker: int, reason: str, commit: int, can_restore: bool = True, **failure: Any
    ) -> list[Action]:
        report = Enlist(self.arbiter.generation, reason, commit, can_restore, **failure)
        return self.receives(worker, report)


def opened(orders: Sequence[Action]) -> Open:
    """Returns the only order to open a generation."""
    (found,) = [one for one in orders if isinstance(one, Open)]
    return found


def finish(orders: Sequence[Action]) -> Finish:
    """Returns the only order to end the job."""
    (found,) = [one for one in orders if isinstance(one, Finish)]
    return found


def place(rank: int, commit: int, current: list[int], slots: list[int], **rest: Any) -> World:
    """Returns a member's place in a world of one host, with workers numbered as their slots, or as given."""
    values = {"generation": 1, "joined": 0, "text": "the job starts", "elapsed": 0, **rest}
    values = {"workers": slots, "initial": len(slots), **values}
    if values["generation"] == 1:
        values["joined"] = len(slots)
    names = [f"localhost:{one}" for one in slots]
    return World(rank=rank, slots=names, job="", address="", commit=commit, current=current, **values)
