"""Training steps in `sirtaki top`, from two snapshots of a job."""

from __future__ import annotations

from typing import Any

import pytest
from rank_samples import NOW, SINCE, sample, stepped

from sirtaki.runner.observe.state_shape import RankSample
from sirtaki.runner.top.rows import RankRow, TrainingProgress, progress_of, rows_of
from sirtaki.runner.top.snapshot import Snapshot
from sirtaki.runner.top.table import columns_of, head_of, progress_texts, significant

STEP_COLUMNS = {"step", "ms/step", "exposed"}


def snapshot(*ranks: RankSample) -> Snapshot:
    return Snapshot(NOW, SINCE, "sirtaki-x", ranks)


def row(now: RankSample, before: RankSample | None = None) -> RankRow:
    (found,) = rows_of(None if before is None else snapshot(before), snapshot(now))
    return found


def test_the_duration_of_a_step_is_that_of_the_steps_between_two_looks() -> None:
    before = sample(time=NOW - 2, steps=stepped(11, 5.0, exposed_seconds=1.0))
    now = sample(steps=stepped(21, 7.0, exposed_seconds=1.5, last_seconds=0.9, age_seconds=0.1))
    found = row(now, before)
    assert (found.step, found.step_seconds, found.exposed) == (21, pytest.approx(0.2), 0.25)


@pytest.mark.parametrize(
    ("age", "generation", "seconds"),
    [(0.1, 1, 0.9), (3.0, 1, 3.0), (0.1, 2, 0.9)],
    ids=["the last one", "the present one, if it takes longer", "not that of another generation"],
)
def test_without_a_new_step_the_last_one_counts(age: float, generation: int, seconds: float) -> None:
    steps = {"last_seconds": 0.9, "age_seconds": age}
    before = sample(time=NOW - 1, generation=generation, steps=stepped(11, 5.0, **steps))
    now = sample(generation=1, steps=stepped(11 if generation == 1 else 21, 5.0, **steps))
    assert row(now, before).step_seconds == seconds


def test_exposed_time_that_begins_anew_is_no_negative_share() -> None:
    before = sample(time=NOW - 1, steps=stepped(9, 5.0, exposed_seconds=4.0))
    assert row(sample(steps=stepped(2, 0.1, exposed_seconds=0.05)), before).exposed == 0.0


def test_a_first_step_has_no_duration() -> None:
    found = row(sample(steps=stepped(1, 0.0)))
    assert (found.step, found.step_seconds, found.exposed) == (1, None, None)


def test_a_job_without_steps_shows_none() -> None:
    plain = snapshot(sample())
    found = rows_of(None, plain)
    assert {name for name, *_ in columns_of(found)}.isdisjoint(STEP_COLUMNS)
    assert progress_of(plain, found) is None
    assert len(head_of(snapshot(sample(size=1)))) == 1


def test_columns_appear_once_any_rank_has_steps() -> None:
    now = snapshot(sample(), sample(1, steps=stepped(5, 1.0, exposed_seconds=0.5)))
    assert {name for name, *_ in columns_of(rows_of(None, now))} >= STEP_COLUMNS


def test_a_rank_may_wait_for_gradients_without_steps() -> None:
    before = sample(time=NOW - 2, steps=stepped(0, 0.0, exposed_seconds=1.0))
    now = sample(steps=stepped(0, 0.0, exposed_seconds=1.5))
    assert row(now, before).exposed == 0.25
    assert {name for name, *_ in columns_of([row(now, before)])} & STEP_COLUMNS == {"exposed"}


def progress(*ranks: RankSample) -> TrainingProgress | None:
    now = snapshot(*ranks)
    return progress_of(now, rows_of(None, now))


def test_goodput_is_that_of_the_process_that_has_lived_longest() -> None:
    steps: dict[str, Any] = {"last_seconds": 0.5}
    old = sample(0, begin=NOW - 100, steps=stepped(150, 75.0, **steps))
    new = sample(1, begin=NOW - 10, steps=stepped(2, 0.5, number=160, **steps))
    gone = sample(2, begin=NOW - 200, is_up=False, steps=stepped(900, 1.0, **steps))
    assert progress(old, new, gone) == TrainingProgress(step=160, rate=2.0, goodput=0.75)


def test_the_head_has_the_training() -> None:
    first, training, *_ = head_of(snapshot(sample()), TrainingProgress(1234, 12.345, 0.934))
    assert first == "sirtaki-x: 1 of 3 ranks are up on hostA"
    assert training == "step 1234, steps/s 12.3, goodput 93%"
    assert progress_texts(TrainingProgress(1, None, None)) == {"step": "1"}


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0123, "0.0123"), (0.5, "0.500"), (12.34, "12.3"), (123.4, "123"), (12345.0, "12345"), (0.0, "0")],
)
def test_three_digits_are_significant(number: float, text: str) -> None:
    assert significant(number) == text
