"""`sirtaki trace merge`: one clock, arrows to the last arrival, and files that are damaged or of two jobs."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from synthetic_timelines import TWO_HOSTS, Call, Clock, merged, opened, three_ranks, timeline, write_job

from sirtaki.runner.cli import commands
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.observe.timeline import merge_timelines
from sirtaki.runner.trace.clocks import align_clocks

CALL = Call("a", 1, 10, 20, 30)


def test_all_times_are_on_the_first_hosts_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path, three_ranks(), TWO_HOSTS)
    events = merged(path, into=tmp_path / "job.json.gz")
    begun = {(event["pid"], int(event["ts"] * 1000)) for event in events if event["name"] == "all-reduce"}
    assert begun == {
        (rank, call.submitted * 1000) for rank, calls in enumerate(three_ranks()) for call in calls
    }
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {pid: name.partition(" (")[0] for pid, name in names.items()} == {n: f"rank {n}" for n in range(3)}
    clocks = [event["args"] for event in events if event["name"] == "clock"]
    assert [(clock["offset_ns"], clock["error_ns"]) for clock in clocks] == [
        (0, 0),
        (0, 0),
        (-7000000123, 5000),
    ]
    assert capsys.readouterr().out.splitlines() == [
        "3 ranks, 24 operations",
        "clock: that of hosta (ranks 0-1)",
        "clock of hostb (rank 2): moved by -7.000000123 s ± 5.00 µs, from 8 exchanges",
        f"{tmp_path}/job.json.gz has the events of all, with 16 arrows to the last rank of each exchange; "
        "https://ui.perfetto.dev shows it",
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "job.json.gz", "t.json", "t.json.rank1", "t.json.rank2",
    ]  # fmt: skip


def test_arrows_lead_from_each_call_to_the_last_one(tmp_path: Path) -> None:
    path = write_job(tmp_path, three_ranks(), TWO_HOSTS)
    events = merged(path, into=tmp_path / "job.json")
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    arrows = {
        (begin["pid"], int(begin["ts"]), ends[number]["pid"], int(ends[number]["ts"]))
        for number, begin in begins.items()
        if begin["ts"] < 2000  # the first plan
    }
    assert arrows == {(0, 1000, 1, 1500), (2, 1100, 1, 1500), (0, 1010, 1, 1510), (2, 1110, 1, 1510)}
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    for number, begin in begins.items():
        end = ends[number]
        assert tracks[begin["pid"], begin["tid"]] == tracks[end["pid"], end["tid"]]


@pytest.mark.parametrize("name", ["job.json", "job.json.gz"])
def test_a_merged_trace_stays_as_it_is(tmp_path: Path, name: str) -> None:
    once, twice = tmp_path / f"once.{name}", tmp_path / f"twice.{name}"
    merged(write_job(tmp_path, three_ranks(), TWO_HOSTS), into=once)
    merged(once, into=twice)
    assert once.read_bytes() == twice.read_bytes()


def test_the_file_of_hvdrun_is_moved_by_what_the_wall_clocks_left(tmp_path: Path) -> None:
    path = write_job(tmp_path, three_ranks(), TWO_HOSTS)
    rank2 = tmp_path / "t.json.rank2"
    stated = re.search(r'"wall_minus_monotonic_ns": (\d+)', rank2.read_text())
    assert stated is not None
    rank2.write_text(
        rank2.read_text().replace(stated[1], str(int(stated[1]) + 30_000_000))
    )  # a wrong wall clock
    assert merge_timelines(path) == "3 ranks"
    _, clock = align_clocks(opened(path))
    assert (clock.offset, clock.error) == (-30_000_000, 5000)


def test_offsets_are_bounded_by_round_trips(tmp_path: Path) -> None:
    calls = [
        [
            Call("a", 1, 1000, 1900, 2070, 1900),
            Call("b", 2, 3000, 3050, 3100),
            Call("c", 3, 4000, 4010, 4020),
        ],
        [
            Call("a", 1, 1800, 1950, 2000, 1950),
            Call("b", 2, 2500, 3120, 3120),
            Call("c", 3, 4000, 4010, 4020),
        ],
    ]
    path = write_job(tmp_path, calls, [TWO_HOSTS[0], TWO_HOSTS[2]])
    _, clock = align_clocks(opened(path))
    # Later by at most 2070 - 1950, since rank 0 ends after rank 1 starts, and earlier by at most 2000 - 1900.
    # No data moved in the others, so their ends are times of decisions.
    assert (clock.offset + TWO_HOSTS[2].ahead, clock.error, clock.exchanges) == (10_000, 110_000, 1)
    calls[0][1], calls[1][1] = (
        Call("b", 2, 3000, 3001, 3100, 3001, "broadcast"),
        calls[1][1]._replace(started=3001, decided=3001, ended=3050, kind="broadcast"),
    )
    _, clock = align_clocks(opened(write_job(tmp_path, calls, [TWO_HOSTS[0], TWO_HOSTS[2]])))
    # The end of a broadcast depends on submissions: earlier by at most 3050 - 3000.
    assert (clock.offset + TWO_HOSTS[2].ahead, clock.error, clock.exchanges) == (35_000, 85_000, 2)


def test_without_exchanges_the_wall_clocks_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [[Call("a", 1, 10, 20, 30, process_set=1)], [Call("b", 2, 10, 20, 30, process_set=2)]]
    path = write_job(tmp_path, alone, [TWO_HOSTS[0], TWO_HOSTS[2]])
    merged(path, into=tmp_path / "job.json")
    assert (
        "moved by -7.000000123 s, by the wall clocks; no exchange bounds the error" in capsys.readouterr().out
    )
    trace = opened(tmp_path / "job.json")
    assert [clock.error for clock in align_clocks(trace)] == [0, None]


def lacking(path: Path) -> list[str]:
    return opened(path).lacks


def test_an_unfinished_file_is_read_up_to_its_last_whole_event(tmp_path: Path) -> None:
    path = write_job(tmp_path, three_ranks())
    text = path.read_text()
    path.write_text(text[: text.rindex('"TRANSFER"')])
    trace = opened(path)
    why = "t.json has no end: its process was killed or still runs; all that it has is used"
    assert trace.lacks == [why]
    assert [len(row.operations) for row in trace.rows] == [8, 8, 8]
    path.write_text(
        text[: text.rindex('{"ph": "X", "name": "NEGOTIATE"')]
    )  # nothing tells when it was decided
    assert [len(row.operations) for row in opened(path).rows] == [7, 8, 8]
    merged(path, into=tmp_path / "job.json")


def test_a_compressed_file_may_be_cut(tmp_path: Path) -> None:
    whole = gzip.compress(timeline(0, [CALL._replace(plan=n, name=f"n{n}") for n in range(1, 2000)]).encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    (row,) = (trace := opened(path)).rows
    assert 100 < len(row.operations) < 1999
    assert [text.partition(":")[0] for text in trace.lacks] == ["t.json.gz has no end"]


def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = write_job(tmp_path, three_ranks())
    lines = path.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if '"all-reduce"' in line)
    lines[at:at] = [
        '{"ph": "X", "name"',
        "[1,",
        '{"ph": "X", "pid": 0, "name": "x", "args": {"plan": 1}},',
        "\0,",
        '{"pid": 0},',
    ]
    lines[at:at] = [
        '{"ph": "X", "pid": 0, "tid": 1, "name": "x", "ts": 1e400, "dur": 1, "args": {"plan": 2}},'
    ]
    path.write_text("\n".join(lines))
    trace = opened(path)
    assert trace.lacks == ["6 lines are damaged in t.json, and left out"]
    assert [len(row.operations) for row in trace.rows] == [8, 8, 8]
    merged(path, into=tmp_path / "job.json")


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    path = write_job(tmp_path, three_ranks())
    (tmp_path / "t.json.rank1").unlink()
    assert lacking(path) == ["the file of rank 1 is missing"]
    (tmp_path / "t.json.rank2").unlink()  # what is left knows how many there were
    assert lacking(path) == ["the files of ranks 1-2 are missing"]


def refused(*paths: Path) -> str:
    with pytest.raises(LaunchError) as caught:
        align_clocks(opened(*paths))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def two_jobs(tmp_path: Path, other: Sequence[Call]) -> Path:
    """Writes rank 0 of one job, and rank 1 of another one."""
    return write_job(tmp_path, [[CALL], list(other)])


def test_files_of_two_jobs_are_refused(tmp_path: Path) -> None:
    path = two_jobs(tmp_path, [CALL._replace(name="b")])
    assert re.search(
        r"\(rank 0\) and .*rank1 \(rank 1\) are not of one job: plan 1 has other tensors", refused(path)
    )
    two_jobs(tmp_path, [CALL._replace(kind="broadcast")])
    assert "are not of one job: plan 1 has other tensors" in refused(path)
    late = CALL._replace(submitted=90_000_000, decided=90_000_010, ended=90_000_020)
    two_jobs(tmp_path, [late])
    assert refused(path) == (
        "these files are not of one job: in one of them, exchanges had ended 90 s before another rank began "
        "them"
    )
    other = tmp_path / "other.json"
    other.write_text(timeline(0, [CALL]))
    assert re.search(
        r"/other.json and .*/t.json are both of rank 0: name the files of one job", refused(tmp_path)
    )


def test_a_merged_trace_of_some_ranks_is_refused_beside_others(tmp_path: Path) -> None:
    path, job = write_job(tmp_path, three_ranks(), TWO_HOSTS), tmp_path / "job.json"
    (other := tmp_path / "t.json.rank2").rename(moved := tmp_path / "later.json")
    merged(path, into=job)
    assert not other.exists()
    assert "has been merged without the other files" in refused(job, moved)


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert refused(path) == f"there is no file {path}"
    assert refused(tmp_path).startswith(f"{tmp_path} has no timelines")
    for text in (
        "",
        "{}",
        "[\n]\n",
        '[\n{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "x"}}\n]',
        "\0",
    ):
        path.write_text(text)
        assert refused(path) == f"{path} is no timeline of sirtaki"
    path.write_bytes(os.urandom(1 << 12) * (1 << 10))
    assert refused(path) == f"{path} is no timeline of sirtaki"


def test_a_file_that_is_read_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_job(tmp_path, three_ranks())
    before = path.read_bytes()
    assert commands.main(["trace", "merge", str(path), "-o", str(path)]) == 2
    assert "would replace a file that is read" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert commands.main(["trace", "merge", str(path), "-o", f"{tmp_path}/no/job.json"]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_each_generation_of_an_elastic_job_has_rows_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    first, second = [CALL], [CALL._replace(submitted=110, decided=120, ended=130)]
    for worker, generation, rank, calls in ((0, 1, 0, first), (1, 1, 1, first), (1, 2, 0, second)):
        path.with_name(f"t.json.worker{worker}.generation{generation}").write_text(
            timeline(rank, calls, Clock())
        )
    events = merged(path, into=tmp_path / "job.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {pid: name.partition(" (")[0] for pid, name in names.items()} == {
        0: "worker 0, generation 1: rank 0",
        1: "worker 1, generation 1: rank 1",
        2: "worker 1, generation 2: rank 0",
    }
    assert sum(event["ph"] == "s" for event in events) == 1
    rows = [[row.rank for row in rows] for rows in opened(tmp_path / "job.json").generations()]
    assert rows == [[0, 1], [0]]
    assert merge_timelines(path) == "2 workers in 2 generations"
    assert [[row.rank for row in rows] for rows in opened(path).generations()] == [[0, 1], [0]]
    assert json.loads(path.read_text())


def test_an_empty_file_beside_others_is_left_out(tmp_path: Path) -> None:
    path = write_job(tmp_path, three_ranks())
    (tmp_path / "t.json.rank1").write_text("[\n")
    assert lacking(path) == [
        "t.json.rank1 is empty: its process was killed early, or the disk was full",
        "the file of rank 1 is missing",
    ]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_slice_of_an_impossible_length_is_left_out(tmp_path: Path, is_last: bool) -> None:
    path = write_job(tmp_path, three_ranks())
    lines = path.read_text().splitlines()
    places = [number for number, line in enumerate(lines) if '"TRANSFER"' in line]
    at = places[-1 if is_last else 0]
    lines[at] = re.sub(r'"dur": \d+', f'"dur": {"9" * 25}', lines[at])
    path.write_text("\n".join(lines))
    trace = opened(path)
    assert trace.lacks == ["1 line is damaged in t.json, and left out"]
    for row in trace.rows:
        assert [operation.plan for operation in row.operations.in_order()] == [1, 1, 2, 2, 3, 3, 4, 4]
