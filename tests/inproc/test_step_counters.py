"""Counters of training steps: what is committed, and the waits of the program."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from world import in_world, world

from sirtaki.bindings.context import current
from sirtaki.bindings.observing import observe, step_counters
from sirtaki.bindings.observing.step_counters import ExposedTime, StepCounters, Stepper
from sirtaki.bindings.survivors import Membership, Survivors


class Clock:
    """A clock that only this test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(step_counters, "time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def take(steps: StepCounters, number: int) -> None:
    for _ in range(number):
        steps.end()


@in_world(1)
def test_steps_are_counted_by_the_core() -> None:
    context = current()
    assert observe.statistics(context)["steps"]["count"] == 0
    take(context.steps, 3)
    context.steps.end(4)  # at once
    counted = observe.statistics(context)["steps"]
    times = counted["times"]
    assert (counted["count"], counted["number"], sum(times["counts"])) == (7, 7, 6)
    assert (times["bounds"][0], times["bounds"][-1], len(times["counts"])) == (0.001, 60.0, 16)
    assert times["total_seconds"] >= 4 * counted["last_seconds"] > 0
    assert counted["productive_seconds"] <= times["total_seconds"]
    assert counted["age_seconds"] > 0
    assert counted["exposed_seconds"] is None


@in_world(1)
def test_a_listener_hears_of_steps_before_they_are_counted() -> None:
    steps, heard = current().steps, []
    optimizer = Stepper("gradients")
    steps.listener = lambda by: heard.append((by, steps.read().number))
    take(steps, 1)  # of no optimizer that it knows
    steps.end(by=optimizer)
    steps.end(by=optimizer)
    assert heard == [(optimizer, 1), (optimizer, 2)]


def test_waits_inside_each_other_count_once(clock: Clock) -> None:
    exposed = ExposedTime()
    assert exposed.seconds is None
    with exposed:
        clock.now += 1.0
        with exposed:
            clock.now += 2.0
        assert exposed.seconds == 3.0  # also while it waits
    clock.now += 4.0
    with contextlib.suppress(ValueError), exposed:
        clock.now += 8.0
        raise ValueError("failed")
    assert exposed.seconds == 11.0


def test_steps_that_are_not_committed_are_lost_with_their_generation() -> None:
    survivors = Survivors()

    def first_generation() -> float:
        steps = current().steps
        take(steps, 3)
        survivors.commit(steps)
        committed = steps.read().productive
        assert (survivors.committed_steps, survivors.committed_seconds) == (3, committed)
        take(steps, 1)
        return float(committed)

    def second_generation() -> float:
        steps = current().steps
        take(steps, 2)
        survivors.commit(steps)
        survivors.commit(steps)
        return float(steps.read().productive)

    seconds = 0.0
    for generation in (first_generation, second_generation):
        with world(1) as ranks:
            seconds += ranks.run(generation)[0]
    assert (survivors.committed_steps, survivors.committed_seconds) == (5, seconds)


@in_world(1)
def test_an_elastic_job_goes_on_with_the_steps_of_its_commits() -> None:
    context = current()
    survivors = context.survivors = Survivors()
    survivors.membership = Membership(generation=2, workers=[0], initial=1)
    survivors.committed_steps, survivors.committed_seconds = 90, 45.0
    take(context.steps, 2)
    survivors.commit(context.steps)
    committed = 45.0 + context.steps.read().productive
    take(context.steps, 1)
    steps = observe.statistics(context)["steps"]
    assert (steps["count"], steps["number"], steps["productive_seconds"]) == (3, 93, committed)


def test_the_last_waits_are_remembered_with_the_present_one(clock: Clock) -> None:
    exposed = ExposedTime()
    assert exposed.recent == []
    for _ in range(100):
        clock.now += 1.0
        with exposed, exposed:  # one inside the other counts once
            clock.now += 0.5
    assert len(exposed.recent) == 64
    assert exposed.recent[-1] == (249.5, 250.0)
    with exposed:
        clock.now += 0.25
        assert exposed.recent[-1] == (250.0, 250.25)
