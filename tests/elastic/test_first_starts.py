"""A program that is killed each time before any worker has enlisted ends an elastic job."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic.arbiter_job import Job, finish
from elastic.running import QUICK as QUICKLY
from elastic.running import run_source

from sirtaki.runner.elastic.arbiter.model import EXIT, Action, Finish, Slot

QUICK = (0.1, 0.1)  # pauses of slots in seconds


def loses_in_turn(job: Job, slot: Slot, count: int) -> list[Action]:
    """Loses the process of a slot so many times; returns the last orders."""
    orders: list[Action] = []
    for _ in range(count):
        assert not any(isinstance(one, Finish) for one in orders)
        orders = job.ticks(job.now + 1.0)
        (worker,) = [one for one in job.arbiter.workers.living() if one.slot == slot]
        orders = job.loses(worker.number)
    return orders


@pytest.mark.parametrize("slots", [1, 2])
def test_three_losses_in_each_slot_end_the_job(slots: int) -> None:
    job = Job(start=slots, slots=slots, cooldown=QUICK)
    orders: list[Action] = []
    for index in range(slots):
        orders = loses_in_turn(job, job.slots[index], 3)
        assert any(isinstance(one, Finish) for one in orders) == (index == slots - 1)
    result = finish(orders)
    count = "3 times, in 1 slot" if slots == 1 else "6 times, in 2 slots"
    assert result.text == (
        f"the program ends before it calls the function of hvd.elastic.run: it was started {count}; "
        f"the last one was the process in slot localhost:{slots - 1}: killed by signal 9"
    )
    assert result.code == 1


def test_a_slot_whose_process_still_starts_keeps_the_job() -> None:
    job = Job(start=2, slots=2, cooldown=QUICK)
    assert not any(isinstance(one, Finish) for one in loses_in_turn(job, job.slots[0], 8))


def test_a_worker_that_has_enlisted_keeps_the_job() -> None:
    job = Job(start=2, slots=2, cooldown=QUICK)
    job.enlists_new(0)
    job.loses(0)
    for slot in job.slots:
        assert not any(isinstance(one, Finish) for one in loses_in_turn(job, slot, 5))


def test_of_two_hosts_one_alone_does_not_end_the_job() -> None:
    job = Job(start=1, slots=[Slot("a", 0), Slot("b", 0)], cooldown=(0.0, 0.0))
    orders = loses_in_turn(job, Slot("a", 0), 5)
    assert not any(isinstance(one, Finish) for one in orders)


def test_a_host_that_is_lost_with_its_processes_does_not_count() -> None:
    job = Job(start=1, slots=1, cooldown=QUICK)
    for _ in range(5):
        (worker,) = job.arbiter.workers.living()
        orders = job.arbiter.ended(worker.number, 0, 9, "its host was lost", job.now, keeps_slot=False)
        assert not any(isinstance(one, Finish) for one in orders)
        job.at(job.now + 1.0).sets_slots(job.slots)
    assert not any(isinstance(one, Finish) for one in loses_in_turn(job, job.slots[0], 2))


def test_short_lives_in_ever_more_slots_end_the_job_too() -> None:
    job = Job(start=1, slots=100)
    orders: list[Action] = []
    for _ in range(100):
        job.ticks(job.now + 0.01)
        (worker,) = job.arbiter.workers.living()
        orders = job.loses(worker.number)
        if any(isinstance(one, Finish) for one in orders):
            break
    assert "it was started 30 times" in finish(orders).text


def test_failures_that_the_user_takes_for_losses_count() -> None:
    job = Job(start=1, slots=1, survive=EXIT, cooldown=QUICK)
    for worker in range(3):
        job.ticks(job.now + 1.0)
        orders = job.sees_exit(worker, 3)
    assert finish(orders).text.endswith("the process in slot localhost:0: failed with exit code 3")


def test_a_program_that_a_signal_kills_at_its_start_is_named(tmp_path: Path) -> None:
    job = run_source(tmp_path, "import os; os.kill(os.getpid(), 11)", ranks=1, options=QUICKLY)
    assert job.code == 1
    assert "before it calls the function of hvd.elastic.run: it was started 3 times, in 1 slot" in job.text
    assert job.text.rstrip().endswith("killed by signal 11 (SIGSEGV)")
