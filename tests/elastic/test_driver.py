"""The driver of an elastic job, with stand-ins for its connections and for what starts workers."""

from __future__ import annotations

import time
from typing import Any

from sirtaki.bindings.bootstrap.elastic.messages import End, Enlist, Message, Received
from sirtaki.runner.elastic.arbiter.model import Finish, Open, Rules, Slot
from sirtaki.runner.elastic.driver import Driver, WorkerEnd
from sirtaki.runner.launch.errors import CannotStart

SLOTS = [Slot("localhost", 0), Slot("localhost", 1)]


class Connections:
    """Records what is sent and opened."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.opened: list[Open] = []

    def send(self, worker: int, message: Message) -> None:
        self.sent.append((worker, message))

    def open(self, order: Open) -> None:
        self.opened.append(order)

    def close_generation(self) -> None: ...


class Workers:
    """Records what is started and killed; starts nothing in a slot that is `broken`."""

    def __init__(self, broken: Slot | None = None) -> None:
        self.started: list[tuple[int, Slot]] = []
        self.killed: list[int] = []
        self.broken = broken

    def start(self, worker: int, slot: Slot) -> None:
        if slot == self.broken:
            raise CannotStart("it is broken")
        self.started.append((worker, slot))

    def kill(self, worker: int) -> None:
        self.killed.append(worker)


class Job:
    """A job of two ranks."""

    def __init__(self, broken: Slot | None = None, **rules: Any) -> None:
        self.post, self.workers = Connections(), Workers(broken)
        self.said: list[str] = []
        self.finished: list[Finish] = []
        post: Any = self.post
        given = Rules(start=2, minimum=1, maximum=2, **rules)
        self.driver = Driver(given, post, self.workers, self.said.append, self.finished.append)
        self.driver.set_slots(SLOTS)

    def trains(self) -> Job:
        for worker in (0, 1):
            self.driver.receive(worker, Enlist(0, "new"))
        for worker in (0, 1):
            self.driver.receive(worker, Received(1))
        return self

    def loses(self, worker: int) -> None:
        self.driver.note_end(worker, WorkerEnd(0, 9, "it was killed", time.monotonic()))


def test_it_starts_workers_and_opens_their_world() -> None:
    job = Job()
    assert job.workers.started == [(0, SLOTS[0]), (1, SLOTS[1])]
    job.trains()
    assert [order.members for order in job.post.opened] == [(0, 1)]
    assert (job.driver.last_ranks(), job.driver.summary()) == ({0: 0, 1: 1}, "")


def test_a_loss_is_said_and_a_new_world_opened() -> None:
    job = Job().trains()
    job.loses(1)
    job.driver.receive(0, Enlist(1, "lost", 3, True))
    assert job.said[0] == "rank 1 was lost: it was killed"
    assert [order.members for order in job.post.opened] == [(0, 1), (0,)]
    assert not job.driver.is_over
    assert job.driver.summary().startswith("2 generations of ranks, 1 rank was lost")


def test_a_limit_has_the_name_by_which_the_user_gave_it() -> None:
    for are_arguments, name in ((False, "--reset-limit"), (True, "reset_limit")):
        job = Job(reset_limit=0, are_arguments=are_arguments).trains()
        job.loses(1)
        (result,) = job.finished
        text = f"1 rank was lost, and {name} allows 0; the last: rank 1"
        assert (result, job.driver.result) == (Finish(1, text, 1), result)


def test_a_worker_that_cannot_be_started_ends_the_job() -> None:
    job = Job(broken=SLOTS[1])
    assert job.finished == [Finish(126, "the process in slot localhost:1 it is broken", 1)]


def test_a_worker_that_was_told_to_end_is_killed_at_last() -> None:
    job = Job().trains()
    job.driver.stop(Finish(130))
    assert [worker for worker, message in job.post.sent if isinstance(message, End)] == [0, 1]
    now = time.monotonic()
    job.driver.advance(now)
    assert job.workers.killed == []
    job.driver.advance(now + 31.0)
    assert job.workers.killed == [0, 1]
    assert job.finished == [Finish(130)]
