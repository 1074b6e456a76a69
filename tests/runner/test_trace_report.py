"""`sirtaki trace report`: exact numbers of synthetic timelines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic_timelines import TWO_HOSTS, Call, gradients, report, rules, three_ranks, write_job
from timelines import read_trace

from sirtaki.runner.cli import commands

Measured = dict[str, Any]


def micro(one: Measured, *names: str) -> list[float]:
    """Returns times in µs."""
    return [round(one[f"{name}_seconds"] * 1e6, 3) for name in names]


def test_each_step_has_its_times_its_rank_and_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, write_job(tmp_path, three_ranks(), TWO_HOSTS))
    times = ("wall", "in_flight", "exposed", "wait", "decision", "transfer")
    assert [micro(step, *times) for step in found["steps"]] == [
        [600, 400, 390, 450, 20, 70],
        [2400, 2000, 1990, 0, 10, 1980],
        [1100, 1000, 990, 0, 890, 100],
        [3920, 20, 10, 0, 5, 5],
    ]
    assert [(step["step"], step["critical_rank"], step["cause"]) for step in found["steps"]] == [
        (1, 1, "late compute"),
        (2, None, "slow transfer"),
        (3, 2, "slow decision"),
        (4, None, None),
    ]
    assert [clock["ranks"] for clock in found["clocks"]] == [[0, 1], [2]]
    assert found["clocks"][1]["offset_seconds"] == -7.000000123
    assert found["clocks"][1]["error_seconds"] == 5e-6


def test_each_rank_has_the_wait_that_it_caused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, write_job(tmp_path, three_ranks(), TWO_HOSTS))
    ranks = {one["rank"]: one for one in found["ranks"]}
    assert {rank: micro(one, "caused_wait", "own_wait", "exposed") for rank, one in ranks.items()} == {
        0: [0, 500, 3580],
        1: [450, 0, 3080],
        2: [0, 400, 3480],
    }
    assert [ranks[rank]["times_last"] for rank in range(3)] == [0, 2, 0]
    late = {"step": 1, "wait_seconds": 450e-6, "at_first_submission": True}
    assert [ranks[rank]["late_steps"] for rank in range(3)] == [[], [late], []]
    assert [ranks[rank]["host"] for rank in range(3)] == ["hosta", "hosta", "hostb"]


def test_each_tensor_has_its_wait_and_its_transfer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, write_job(tmp_path, three_ranks(), TWO_HOSTS))
    tensors = {one["name"]: one for one in found["tensors"]}
    assert list(tensors) == ["a", "b"]
    assert (tensors["a"]["kind"], tensors["a"]["count"], tensors["a"]["bytes"]) == ("all-reduce", 4, 4000)
    # Twelve values each: waits 500, 400 and ten of 0; transfers 3 x 100, 3 x 2000, 3 x 1000, 3 x 20.
    times = ("wait_p50", "wait_p99", "transfer_p50", "transfer_p99")
    assert micro(tensors["a"], *times) == [0, 500, 100, 2000]
    assert micro(tensors["b"], *times) == [0, 500, 90, 1990]


def test_a_merged_trace_has_the_same_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, job = write_job(tmp_path, three_ranks(), TWO_HOSTS), tmp_path / "job.json.gz"
    assert commands.main(["trace", "merge", str(path), "-o", str(job)]) == 0
    assert report(capsys, path) == report(capsys, job)


def test_the_text_names_the_rank_and_where_it_is_slow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        gradients(n, (n * 1000, n * 1000 + 400), (n * 1000 + 420,) * 2, n * 1000 + 430) for n in range(1, 7)
    ]
    path = write_job(tmp_path, [[call for step in steps for call in step[rank]] for rank in range(2)])
    assert commands.main(["trace", "report", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["2 ranks, 24 operations", "clock: that of hosta (ranks 0-1)"]
    assert lines[3] == (
        "steps: 6, wall p50 1.00 ms, p99 1.00 ms; exposed 24 % of the time; overlap 4 % of the exchanges"
    )
    assert lines[4] == "causes: late compute 6"
    assert lines[-3] == (
        "warning: the others wait for rank 1 in most steps (they waited 2.40 ms, 44 % of the time; mostly in "
        "5 of 6 steps): it is slow before its first exchange of a step: look at its share of the data and at "
        "what else its cores do [late-rank]"
    )
    assert lines[-1] == "1 warning"


def test_a_rank_that_is_late_now_and_then_during_backward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks: list[list[Call]] = [[], []]
    for n in range(1, 9):
        begin, late = n * 1000, 500 if n == 4 else 0
        for rank in range(2):
            second = begin + 10 + (late if rank == 0 else 0)
            ranks[rank].append(Call("a", 2 * n - 1, begin, begin + 5, begin + 8))
            ranks[rank].append(Call("b", 2 * n, second, begin + 15 + late, begin + 20 + late))
    found = report(capsys, write_job(tmp_path, ranks))
    (warning,) = (one for one in found["findings"] if one["rule"] == "pausing-rank")
    assert warning["what"] == "the others wait for rank 0 in some steps"
    assert warning["evidence"].endswith("; mostly in 1 of 8 steps: 4")
    assert warning["remedy"].startswith("it pauses between exchanges of these steps: ")


def test_steps_are_found_among_other_exchanges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["p", "q", *"abm", *"ab", *"bax", *"abmm", "end"]  # p, q: once before; m, x, end: now and then
    calls = [
        Call(name, plan, plan * 100, plan * 100 + 10, plan * 100 + 20, bytes=0 if name == "m" else 1000)
        for plan, name in enumerate(names, 1)
    ]
    found = report(capsys, write_job(tmp_path, [calls, calls]))
    # Each step ends with the last exchange before the next step tensor; the first begins with "a".
    assert [micro(step, "wall") for step in found["steps"]] == [[220], [200], [300], [500]]
    assert "no-steps" in rules(report(capsys, write_job(tmp_path, [calls[:2], calls[:2]])))


def test_data_that_moves_hides_a_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [(Call("a", 2 * n - 1, n * 1000, n * 1000 + 20, n * 1000 + 500),) for n in (1, 2)]
    later = [(Call("b", 2 * n, n * 1000 + 10, n * 1000 + 530, n * 1000 + 600),) for n in (1, 2)]
    calls = [call for one, two in zip(steps, later, strict=True) for call in (*one, *two)]
    found = report(capsys, write_job(tmp_path, [calls, calls]))
    # "b" is decided when "a" has ended: 10 + 30 µs without any transfer, and 480 + 70 µs with one.
    times = ("exposed", "wait", "decision", "transfer")
    assert [micro(step, *times) for step in found["steps"]] == [[590, 0, 40, 550]] * 2


def test_rounds_of_a_name_are_one_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [Call(f"a (round {n})", n, n * 100, n * 100 + 10, n * 100 + 20) for n in range(1, 6)]
    path, job = write_job(tmp_path, [calls, calls]), tmp_path / "job.json"
    found = report(capsys, path)
    assert [(one["name"], one["count"]) for one in found["tensors"]] == [("a", 5)]
    assert len(found["steps"]) == 5
    assert commands.main(["trace", "merge", str(path), "-o", str(job)]) == 0
    assert len(read_trace(job)) == len(read_trace(path)) * 2 + 2 * 5


def test_files_that_end_early_blame_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [Call("a", n, n * 100, n * 100 + 10, n * 100 + 20) for n in range(1, 6)]
    path = write_job(tmp_path, [calls, calls[:3]])
    found = report(capsys, path)
    assert rules(found)["exchanges-lack"] == "2 of 5"
    assert len(found["steps"]) == 3
    path = write_job(tmp_path, [calls, [calls[0], calls[4]]])  # it had joined in between
    assert "exchanges-lack" not in rules(report(capsys, path))
    path.with_name("t.json.rank2").write_text(
        path.read_text().replace('"pid": 0', '"pid": 2').replace("rank 0", "rank 2")
    )
    path.with_name("t.json.rank1").unlink()
    assert rules(report(capsys, path))["files-lack"] == "the file of rank 1 is missing"


def test_a_rank_that_has_written_nothing_leaves_all_exchanges_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero, _, two = three_ranks()
    found = report(capsys, write_job(tmp_path, [zero, [], two]))
    assert rules(found) == {"files-lack": "there are no operations of rank 1", "exchanges-lack": "8 of 8"}
    assert found["steps"] == []


def failed(calls: Sequence[tuple[str, int, str]]) -> list[Call]:
    return [
        Call("loss", 0, 100, 200, 200, kind=kind, bytes=size, fused=0, status=status)
        for kind, size, status in calls
    ]


def test_mismatches_have_both_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = failed(
        [("all-reduce", 24, "mismatch"), ("all-reduce", 8, "mismatch"), ("all-reduce", 8, "peer_lost")]
    )
    other = failed([("all-reduce", 32, "mismatch"), ("all-reduce", 8, "mismatch")])
    found = report(capsys, write_job(tmp_path, [mine, other]), code=1)
    assert rules(found) == {
        "mismatch": "rank 0 all-reduce of 24 bytes, rank 1 all-reduce of 32 bytes; rank 0 all-reduce of 8 "
        "bytes, rank 1 all-reduce of 8 bytes; the same kind and size, so the dtype, shape or operation "
        "differs",
        "operations-failed": "'loss'",
    }
    assert found["failures"][0] == {
        "name": "loss",
        "generation": 0,
        "statuses": ["mismatch"],
        "error": None,
        "submitted": [
            {"rank": 0, "kind": "all-reduce", "bytes": 24, "place": None},
            {"rank": 1, "kind": "all-reduce", "bytes": 32, "place": None},
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: merge | report"),
        (("merge", "t.json"), "the following arguments are required: -o/--output"),
        (("report",), "the following arguments are required: FILE"),
        (("report", "none.json"), "there is no file none.json"),
        (("report", "none.json", "--jsn"), "there is no option --jsn"),
    ],
)
def test_mistakes_end_with_2(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["trace", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sirtaki trace: ")
    assert message in error


def test_a_mismatch_of_which_one_rank_has_a_record_says_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path, [failed([("all-reduce", 24, "mismatch")]), []])
    assert rules(report(capsys, path, code=1))["mismatch"] == "rank 0 all-reduce of 24 bytes"
