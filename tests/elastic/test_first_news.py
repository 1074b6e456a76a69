"""The time in which a change is noticed: the arbiter's account of it in virtual time, and a rank's record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elastic.arbiter_job import Job, opened
from elastic.running import FAILSAFE_SECONDS, QUICK, run_job
from timelines import check_trace, slices_named

from sirtaki.bindings.bootstrap.elastic.messages import Change, Counted, Drain, LeaveAt, Returned, World
from sirtaki.bindings.observing.elastic_timeline import ElasticTimeline
from sirtaki.bindings.survivors import Membership, Survivors
from sirtaki.common.elastic import loop
from sirtaki.common.elastic.loop import ChangeClock
from sirtaki.runner.elastic.arbiter.model import Action, Kill, Send


def first_news(orders: list[Action]) -> float | None:
    """Returns the moment from which the change to a new generation is counted."""
    return opened(orders).first_news


# ---- The arbiter ---------------------------------------------------------------------------------------


def test_the_first_generation_has_no_news_before_it() -> None:
    job = Job(start=2, slots=2)
    job.at(1.0).enlists_new(0)
    assert first_news(job.at(3.0).enlists_new(1)) is None


def test_a_loss_counts_from_its_notice() -> None:
    job = Job(start=3, slots=3).trains()
    job.at(10.0).loses(1)
    job.at(10.125).leaves(0, "lost", 4)
    assert first_news(job.at(10.5).leaves(2, "lost", 4)) == 10.0


def test_a_broken_link_counts_from_the_first_report_of_it() -> None:
    job = Job(start=3, slots=3).trains()
    job.at(20.0).leaves(0, "lost", 4, culprit=1, kind="peer_lost")
    job.at(20.25).loses(1)
    assert first_news(job.at(21.0).leaves(2, "lost", 4)) == 20.0


def test_further_losses_do_not_count() -> None:
    job = Job(start=3, slots=3).trains()
    job.at(10.0).loses(1)
    job.at(12.0).leaves(0, "lost", 4)
    assert first_news(job.at(14.0).loses(2)) == 10.0


@pytest.mark.parametrize("is_reported_first", [False, True])
def test_a_silent_host_counts_from_when_it_was_last_heard_of(is_reported_first: bool) -> None:
    job = Job(start=2, slots=2).trains()
    job.at(19.0)
    if is_reported_first:
        job.leaves(0, "lost", 4, culprit=1, kind="peer_lost")
    job.at(20.0).arbiter.gone_since(1, 5.0)
    orders = job.loses(1)
    assert first_news(orders if is_reported_first else job.leaves(0, "lost", 4)) == 5.0


def test_the_silence_of_a_new_worker_is_no_news() -> None:
    job = Job(start=2, slots=3).trains()
    job.at(20.0).arbiter.gone_since(2, 5.0)  # it was starting
    job.loses(2)
    job.at(30.0).loses(1)
    assert first_news(job.at(30.5).leaves(0, "lost", 4)) == 30.0


def test_an_exceeded_deadline_counts_from_the_first_report_of_it() -> None:
    job = Job(start=3, slots=3).trains()
    orders = job.at(30.0).leaves(0, "lost", 2, culprit=1, kind="timeout", text="rank 1 is late")
    assert Kill(1) in orders
    job.at(30.25).leaves(2, "lost", 2, culprit=1, kind="timeout", text="rank 1 is late")
    assert first_news(job.at(31.5).loses(1)) == 30.0


def test_a_planned_change_counts_from_its_announcement() -> None:
    job = Job(start=1, slots=2).trains()
    assert job.at(40.0).enlists_new(1) == [Send(0, Change(1, 1))]
    job.at(41.0).receives(0, Counted(1, 1, 6))
    assert first_news(job.at(43.0).leaves(0, "changed", 7)) == 40.0


def test_a_change_that_is_called_off_counts_from_its_last_announcement() -> None:
    job = Job(start=2, slots=3).trains()
    job.at(40.0).enlists_new(2)
    job.receives(0, Counted(1, 1, 6))
    assert job.ticks(70.0) == [Send(0, LeaveAt(1, 0)), Send(1, LeaveAt(1, 0))]
    assert job.ticks(100.0) == [Send(0, Change(1, 2)), Send(1, Change(1, 2))]
    job.receives(0, Counted(1, 2, 9))
    job.receives(1, Counted(1, 2, 9))
    job.at(102.0).leaves(0, "changed", 10)
    assert first_news(job.at(102.5).leaves(1, "changed", 10)) == 100.0


def test_a_loss_during_a_planned_change_counts_from_its_notice() -> None:
    job = Job(start=2, slots=2).trains()
    job.at(40.0).receives(1, Drain(1))  # and the members are asked
    job.at(45.0).loses(1)
    assert first_news(job.at(45.25).leaves(0, "lost", 4)) == 45.0


def test_a_loss_after_the_first_rank_has_left_as_planned_does_not_count() -> None:
    job = Job(start=2, slots=3).trains()
    job.at(40.0).enlists_new(2)
    job.receives(0, Counted(1, 1, 6))
    job.receives(1, Counted(1, 1, 6))
    job.at(41.0).leaves(0, "changed", 7)
    assert first_news(job.at(42.0).loses(1)) == 40.0


def test_each_generation_counts_anew() -> None:
    job = Job(start=2, slots=2).trains()
    job.at(10.0).leaves(0, "lost", 1, culprit=1, kind="peer_lost")
    assert first_news(job.at(11.0).leaves(1, "lost", 1, culprit=0, kind="peer_lost")) == 10.0
    job.at(14.0).leaves(0, "lost", 1, kind="link", text="no route")
    assert first_news(job.at(14.5).leaves(1, "lost", 1, kind="link", text="no route")) == 14.0


def test_a_loss_at_the_end_counts_like_any_other() -> None:
    job = Job(start=3, slots=3).trains()
    job.at(9.0).receives(0, Returned(1))
    job.at(10.0).loses(1)
    assert first_news(job.at(10.5).leaves(2, "lost", 4)) == 10.0


# ---- A rank --------------------------------------------------------------------------------------------

MILLISECOND = 1_000_000  # nanoseconds


def world(generation: int, milliseconds: int) -> World:
    """Returns the place of rank 0, in an answer so long after the first news."""
    slots, elapsed = ["localhost:0", "localhost:1"], 1000 * milliseconds
    return World(generation, 0, slots, [4, 5], 2, "job", "", 3, [0], 0, "a rank was lost", elapsed)


class Moments:
    """A clock that shows the given milliseconds, one after the other."""

    def __init__(self, *moments: int) -> None:
        self._moments: Iterator[int] = iter(moments)

    def monotonic_ns(self) -> int:
        return MILLISECOND * next(self._moments)


class Rank:
    """A rank that goes through a change, with a timeline in `path`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, is_new: bool, *moments: int) -> None:
        monkeypatch.setattr(loop, "time", Moments(*moments))
        self.survivors = Survivors()
        self.survivors.timeline = ElasticTimeline(str(path), mark_decisions=False)
        if not is_new:
            self.survivors.membership = Membership(1, [4, 5, 6], 3)
        self.clock = ChangeClock(self.survivors)

    def goes_on(self, last: World) -> dict[str, Any]:
        """Ends the phases after the agreement; returns the record."""
        self.clock.end_phase()
        self.clock.end_phase()
        context: Any = SimpleNamespace(setting=lambda _: "", survivors=self.survivors, rank=0)
        self.clock.record(context, last)
        return dict(self.survivors.changes[-1])


def detections(path: Path) -> list[dict[str, Any]]:
    events = check_trace(path.with_name("t.json.worker0.changes").read_text() + "]")
    assert slices_named(events, "Changes of the ranks") == ["GENERATION 2", "AGREE", "REBUILD", "STATE"]
    found = [event for event in events if event["name"] == "DETECT"]
    assert len(slices_named(events, "Detection of changes")) == len(found)
    return found


def test_a_rank_detects_a_change_until_it_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leaves 70 ms after the first news, which was 100 ms before the answer."""
    rank = Rank(monkeypatch, tmp_path / "t.json", False, 5_000, 5_030, 5_040, 5_090)
    rank.clock.take_world(world(2, 100))
    record = rank.goes_on(world(2, 100))
    seconds = [record[f"{phase}_seconds"] for phase in ("detect", "agree", "rebuild", "state")]
    assert seconds == [0.07, 0.03, 0.01, 0.05]
    (event,) = detections(tmp_path / "t.json")
    assert (event["ts"], event["dur"]) == (Decimal(4_930_000), Decimal(70_000))
    assert event["args"] == {"generation": 2}
    assert json.dumps(record)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_rank_that_left_first_or_is_new_has_detected_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_new: bool
) -> None:
    rank = Rank(monkeypatch, tmp_path / "t.json", is_new, 5_000, 5_030, 5_040, 5_090)
    told = world(2, 5_000 if is_new else 20)
    rank.clock.take_world(told)
    assert rank.goes_on(told)["detect_seconds"] == 0.0
    assert detections(tmp_path / "t.json") == []


def test_a_rank_that_computes_leaves_after_the_news(tmp_path: Path) -> None:
    """Kills a rank when the other one has begun to compute, which takes a second longer."""
    job = run_job(("-np", "2", "--min-np", "1", *QUICK), "late_leaver.py", tmp_path)
    assert job.code == 0, job.text
    survivor = next(result for result in job.results if result["worker"] == 0)
    loss = next(change for change in survivor["changes"] if change["lost"] == [1])
    assert 0.3 < loss["detect_seconds"] < FAILSAFE_SECONDS


def test_the_first_answer_counts_if_the_ranks_change_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rank = Rank(monkeypatch, tmp_path / "t.json", False, 5_000, 5_030, 6_000, 6_010, 6_020)
    rank.clock.take_world(world(2, 100))
    rank.clock.begin_again()
    rank.clock.take_world(world(2, 1))
    record = rank.goes_on(world(2, 1))
    assert (record["detect_seconds"], record["agree_seconds"]) == (0.07, 1.0)
