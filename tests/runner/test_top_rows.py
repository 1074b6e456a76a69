"""Rows of `sirtaki top`, from two snapshots of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rank_samples import NOW, SINCE, pending, sample, stepped

from sirtaki.runner.observe.state_shape import RankSample
from sirtaki.runner.top.rows import FINE, NOTE, PROBLEM, RankRow, rows_of
from sirtaki.runner.top.snapshot import Snapshot, from_line
from sirtaki.runner.top.table import head_of, legend_of, readable


def rows(*ranks: RankSample, before: tuple[RankSample, ...] = (), now: float = NOW) -> list[RankRow]:
    earlier = Snapshot(now - 1, SINCE, "sirtaki-x", before) if before else None
    return rows_of(earlier, Snapshot(now, SINCE, "sirtaki-x", ranks))


def test_rates_are_differences_divided_by_the_time_between_two_states() -> None:
    later = sample(
        time=NOW,
        operations=30,
        bytes=5000,
        waiting_seconds=2.0,
        moving_seconds=1.5,
        late_seconds=0.5,
        cpu_seconds=8.0,
    )
    (row,) = rows(later, before=(sample(time=NOW - 2),))
    assert (row.operations, row.bytes) == (10.0, 2000.0)
    assert row.cores == 3.0  # the processor time is that of the snapshots, which are 1 s apart
    assert (row.waiting, row.moving, row.late) == (0.5, 0.25, 0.25)
    assert (row.state, row.level, row.memory) == ("runs", FINE, 1 << 20)


def test_a_rank_that_was_not_there_before_has_no_rates() -> None:
    (row,) = rows(sample(), before=(sample(1),))
    assert (row.operations, row.bytes, row.waiting) == (0.0, 0.0, 0.0)


def test_counters_that_begin_anew_make_no_negative_rates() -> None:
    (row,) = rows(sample(operations=3), before=(sample(time=NOW - 1, operations=300),))
    assert row.operations == 0.0


def test_the_rank_that_computes_while_another_waits_is_named() -> None:
    waiting, computing = rows(
        sample(0, activity=pending(3.2)), sample(1, time=NOW - 0.5, line="at train.py:9")
    )
    assert waiting.state == "waits 3.2 s for rank 1 to submit 'loss'"
    assert waiting.level == FINE
    assert (computing.state, computing.level) == ("computes, at train.py:9; others wait 3.2 s", NOTE)


def test_a_wait_becomes_a_problem_after_ten_seconds() -> None:
    found = rows(sample(0, activity=pending(11.0)), sample(1))
    assert [row.level for row in found] == [FINE, PROBLEM]  # it is where the named rank is


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": 2.0, "process_set": 1},  # it is not known who belongs to it
        {"seconds": 2.0, "kind": "send"},
    ],
)
def test_ranks_that_need_not_submit_an_operation_are_not_blamed(changes: dict[str, Any]) -> None:
    waiting, computing = rows(sample(0, activity=pending(**changes)), sample(1))
    assert "for other ranks to submit 'loss'" in waiting.state
    assert (computing.state, computing.level) == ("runs", FINE)


def test_a_rank_that_was_idle_before_the_wait_only_is_not_blamed() -> None:
    busy = pending(0.1, name="other")
    waiting, other = rows(
        sample(0, activity=pending(1.5)),
        sample(1, time=NOW, activity=busy),
        before=(sample(1, time=NOW - 2.0),),
    )
    assert waiting.state == "waits 1.5 s for other ranks to submit 'loss'"
    assert other.level == FINE


def test_an_idle_state_from_after_the_look_at_the_waiting_rank_blames_nobody() -> None:
    waiting, other = rows(sample(0, time=NOW - 0.9, activity=pending(1.5)), sample(1, time=NOW - 0.1))
    assert "for other ranks" in waiting.state
    assert other.level == FINE


def test_the_state_before_counts_if_it_was_within_the_wait() -> None:
    waiting, other = rows(
        sample(0, time=NOW - 0.9, activity=pending(1.5)),
        sample(1, time=NOW - 0.1),
        before=(sample(1, time=NOW - 1.1),),
    )
    assert "for rank 1 to submit 'loss'" in waiting.state
    assert other.level == NOTE


def test_a_rank_that_has_submitted_since_is_not_blamed() -> None:
    busy = pending(0.2)
    waiting, other, idle = rows(
        sample(0, activity=pending(5.0)),
        sample(1, activity=busy),
        sample(2),
        before=(sample(1, time=NOW - 1), sample(2, time=NOW - 1)),
    )
    assert "for rank 2 to submit 'loss'" in waiting.state
    assert (other.level, idle.level) == (FINE, NOTE)


def test_a_look_that_took_long_blames_nobody() -> None:
    waiting, other = rows(sample(0, activity=pending(1.5)), sample(1, time=NOW - 1.6, look_seconds=1.7))
    assert "for other ranks" in waiting.state
    assert other.level == FINE


def test_a_state_that_was_written_for_another_watcher_is_not_silence() -> None:
    (row,) = rows_of(None, Snapshot(NOW, NOW - 1, "sirtaki-x", (sample(time=NOW - 60),)))
    assert row.level == FINE


def test_a_snapshot_is_new_once_each_rank_that_can_has_written() -> None:
    first, second = sample(0, size=2), sample(1, size=2)

    def is_new(*ranks: RankSample) -> bool:
        return Snapshot(NOW, NOW - 1, "sirtaki-x", ranks).is_newer_than({100: NOW - 1})

    assert is_new(first, second)
    assert not is_new(first)  # rank 1 has written nothing
    assert not is_new(replace(first, time=NOW - 1), second)
    assert is_new(first, replace(second, time=NOW - 60, is_stopped=True))
    assert is_new(first, replace(second, time=NOW - 60, is_up=False))
    assert not is_new(first, replace(second, time=NOW - 60))


@pytest.mark.parametrize(
    ("changes", "state", "level"),
    [
        ({"is_up": False}, "has ended, or left its world", PROBLEM),
        ({"is_stopped": True}, "is stopped: continue it with `kill -CONT`", PROBLEM),
        (
            {"time": NOW - 7},
            "silent for 7 s: in code that holds Python's GIL, without a core, or ending",
            PROBLEM,
        ),
        ({"activity": pending(0.2)}, "runs", FINE),
        ({"activity": pending(2.5, is_agreed=True)}, "in all-reduce 'loss' for 2.5 s", FINE),
        ({"activity": pending(12.0, is_agreed=True)}, "in all-reduce 'loss' for 12.0 s", PROBLEM),
        ({"activity": pending(2.0)}, "waits 2.0 s for other ranks to submit 'loss'", FINE),
        ({"activity": pending(12.0)}, "waits 12.0 s for other ranks to submit 'loss'", PROBLEM),
    ],
)
def test_states(changes: dict[str, Any], state: str, level: str) -> None:
    (row,) = rows(sample(**changes))
    assert (row.state, row.level) == (state, level)


def test_a_recorded_snapshot_is_the_same_when_it_is_read() -> None:
    snapshot = Snapshot(NOW, SINCE, "sirtaki-x", (sample(0), sample(1, activity=pending(2.0))))
    assert from_line(snapshot.as_line()) == snapshot


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"schema": 1}', '{"schema": 2, "ranks": [{}]}'])
def test_a_line_that_is_no_snapshot_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_line(line)


def test_the_head_names_missing_ranks_and_the_last_change() -> None:
    lost = "rank 2 (pid 7) was lost"
    first, change, away = head_of(
        Snapshot(NOW, SINCE, "sirtaki-x", (sample(0, generation=2, last_change=lost), sample(1, is_up=False)))
    )
    assert first == "sirtaki-x: 1 of 3 ranks are up on hostA"
    assert change == f"generation 2: {lost}"
    assert away.startswith("1 of 3 ranks have written nothing yet, or are on other hosts")


def test_no_rank_is_away_while_ranks_of_an_older_world_are_up() -> None:
    ranks = (sample(0, size=1, generation=2), sample(1, size=2, generation=1))
    assert len(head_of(Snapshot(NOW, SINCE, "sirtaki-x", ranks))) == 1


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1.0 KiB"), (50 << 20, "50 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes(size: float, text: str) -> None:
    assert readable(size) == text


def test_the_legend_explains_the_shares_that_are_shown() -> None:
    found = legend_of(rows(sample(steps=stepped(2, 1.0, exposed_seconds=0.5))))
    assert all(f"{name}: " in found for name in ("exposed", "waits", "moves", "late"))
    assert "exposed" not in legend_of(rows(sample()))
