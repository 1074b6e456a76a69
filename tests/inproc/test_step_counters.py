"""Counters of training steps: durations, what counts as productive, and what is committed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from world import world

from sirtaki.bindings import default_context, observe, step_counters
from sirtaki.bindings.observe import Steps
from sirtaki.bindings.step_counters import BOUNDS, ExposedTime, StepCounters
from sirtaki.bindings.survivors import Membership, Survivors


class Clock:
    """A clock that only this test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(step_counters, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def step(self, steps: StepCounters, *durations: float) -> None:
        for seconds in durations:
            self.now += seconds
            steps.end()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_step_lasts_from_the_end_of_the_one_before(clock: Clock) -> None:
    steps = StepCounters()
    assert (steps.count, steps.age_seconds) == (0, 0.0)
    clock.step(steps, 50.0, 0.25, 0.5, 1.5)  # the beginning of the first one is not known
    clock.now += 0.125
    assert (steps.count, steps.total_seconds, steps.last_seconds) == (4, 2.25, 1.5)
    assert steps.age_seconds == 0.125
    expected = {BOUNDS.index(0.25): 1, BOUNDS.index(0.5): 1, BOUNDS.index(2.5): 1}
    assert {place: count for place, count in enumerate(steps.counts) if count} == expected


def test_a_step_beyond_the_last_bound_is_counted(clock: Clock) -> None:
    steps = StepCounters()
    clock.step(steps, 0.0, 1000.0)
    assert (steps.counts[-1], sum(steps.counts)) == (1, 1)


def test_several_steps_that_end_at_once_share_their_time(clock: Clock) -> None:
    steps = StepCounters()
    clock.step(steps, 0.0)
    clock.now += 2.0
    steps.end(4)
    assert (steps.count, steps.total_seconds, steps.last_seconds) == (5, 2.0, 0.5)
    assert steps.counts[BOUNDS.index(0.5)] == 4


def test_a_long_step_is_as_productive_as_usual(clock: Clock) -> None:
    steps = StepCounters()
    clock.step(steps, 0.0, 1.0, 1.0, 2.0, 60.0, 1.0)  # two seconds are twice the median, and not more
    assert steps.total_seconds == 65.0
    assert steps.productive_seconds == 6.0


def test_steps_that_stay_longer_become_usual(clock: Clock) -> None:
    steps = StepCounters()
    clock.step(steps, 0.0, *[1.0] * 15, *[4.0] * 15)
    before = steps.productive_seconds
    clock.step(steps, 4.0)
    assert steps.productive_seconds - before == 4.0


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


def test_steps_that_are_not_committed_are_lost_with_their_generation(clock: Clock) -> None:
    survivors, first, second = Survivors(), StepCounters(), StepCounters()
    clock.step(first, 0.0, 1.0, 1.0)
    survivors.commit(first)
    clock.step(first, 1.0)
    assert (first.uncommitted, survivors.committed_steps, survivors.committed_seconds) == (1, 3, 2.0)
    clock.step(second, 9.0, 1.0)
    survivors.commit(second)
    survivors.commit(second)
    assert (second.uncommitted, survivors.committed_steps, survivors.committed_seconds) == (0, 5, 3.0)


def test_an_elastic_job_goes_on_with_the_steps_of_its_commits(clock: Clock) -> None:
    def continue_training() -> Steps:
        context = default_context.current()
        survivors = context.survivors = Survivors()
        survivors.membership = Membership(generation=2, workers=[0], initial=1)
        survivors.committed_steps, survivors.committed_seconds = 90, 45.0
        clock.step(context.steps, 0.0, 1.0)
        survivors.commit(context.steps)
        clock.step(context.steps, 1.0)
        return observe.statistics(context)["steps"]

    with world(1) as ranks:
        (steps,) = ranks.run(continue_training)
    assert (steps["count"], steps["number"], steps["productive_seconds"]) == (3, 93, 46.0)


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
