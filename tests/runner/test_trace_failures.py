"""`sirtaki trace` with failure reports and mismatches: they are joined with timelines, on the same clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from synthetic_timelines import (
    HERE,
    TWO_HOSTS,
    Call,
    failure_report,
    merged,
    opened,
    report,
    rules,
    three_ranks,
    timeline,
    write_job,
    write_reports,
)
from timelines import check_trace

from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.observe.timeline import merge_timelines
from sirtaki.runner.observe.timeline_events import EventFile
from sirtaki.runner.trace.clocks import align_clocks
from sirtaki.runner.trace.reading import read_trace
from sirtaki.runner.trace.sources import Meter, find_sources

LOST = Call("c", 0, 9_100, 99_000, 99_000)  # still in flight when the job fails
FAILED_AT = 10_000
WITH_LOST = [[*calls, LOST] for calls in three_ranks()]
ERROR = "ranks disagree about 'loss': rank 0 has float32 of shape [3], rank 1 has float32 of shape [4]; hint"


def refused(*paths: Path) -> str:
    with pytest.raises(LaunchError) as caught:
        opened(*paths)
    return str(caught.value)


def test_failure_reports_alone_are_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_reports(tmp_path / "dump", WITH_LOST, FAILED_AT, TWO_HOSTS)
    found = report(capsys, folder, code=1)
    of_timelines = opened(write_job(tmp_path, three_ranks(), TWO_HOSTS))
    for row, expected in zip(opened(folder).rows, of_timelines.rows, strict=True):
        without_texts = [one._replace(name=0, kind=0) for one in row.operations.in_order()]
        assert without_texts == [one._replace(name=0, kind=0) for one in expected.operations.in_order()]
    assert found["clocks"][1]["offset_seconds"] == -7.000000123
    assert found["clocks"][1]["error_seconds"] == 5e-6
    assert len(found["steps"]) == 4
    assert rules(found)["world-failed"] == "by the failure reports of ranks 0-2"
    assert [one["reason"] for one in found["endings"]] == ["rank 1 was lost"] * 3
    assert found["endings"][2]["doing"] == (
        "rank 2 (pid 102) waited for other ranks to submit 'c' (all-reduce) for 0.0 s"
    )
    assert report(capsys, folder / "rank0.json", code=1) == found  # the others beside it are read, too


@pytest.mark.parametrize("kind", ["ranks", "hvdrun", "merged"])
def test_a_report_adds_what_a_timeline_lacks(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Timelines of the first two steps, as ranks, hvdrun or `sirtaki trace merge` leave them."""
    path = write_job(tmp_path, [calls[:4] for calls in three_ranks()], TWO_HOSTS)
    if kind == "hvdrun":
        assert merge_timelines(path) == "3 ranks"
    if kind == "merged":
        job = tmp_path / "first.json"
        merged(path, into=job)
        path = job
    folder = write_reports(tmp_path / "dump", WITH_LOST, FAILED_AT, TWO_HOSTS)
    whole = opened(write_job(tmp_path / "dump", three_ranks()))  # on one clock
    trace = opened(path, *folder.glob("rank*.json"))
    clock_of = {id(row): clock for clock in align_clocks(trace) for row in clock.rows}
    for row, expected in zip(trace.rows, whole.rows, strict=True):
        clock = clock_of[id(row)]
        for one, true in zip(row.operations.in_order(), expected.operations.in_order(), strict=True):
            assert one.plan == true.plan
            for moment in ("submitted", "decided", "started", "ended"):
                error = getattr(one, moment) + clock.offset - getattr(true, moment)
                assert abs(error) <= (clock.error or 0), (one, true)
    events = merged(path, *folder.glob("rank*.json"), into=tmp_path / "job.json")
    ends = [event for event in events if event["name"] == "the world failed"]
    assert [event["pid"] for event in ends] == [0, 1, 2]
    open_ones = [event for event in events if event.get("cat") == "unfinished" and "args" in event]
    assert [int(event["dur"]) for event in open_ones] == [900] * 3
    assert [one["ts"] + one["dur"] for one in open_ones] == [end["ts"] for end in ends]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert {names[event["pid"], event["tid"]] for event in open_ones} == {"c"}
    found = report(capsys, path, *folder.glob("rank*.json"), code=1)
    assert report(capsys, tmp_path / "job.json", code=1) == found


def test_a_merged_trace_with_reports_stays_as_it_is(tmp_path: Path) -> None:
    path, folder = write_job(tmp_path, three_ranks()), write_reports(tmp_path / "dump", WITH_LOST, FAILED_AT)
    once, twice = tmp_path / "once.json", tmp_path / "twice.json"
    merged(path, folder, into=once)
    merged(once, into=twice)
    assert sorted(once.read_text().splitlines()) == sorted(twice.read_text().splitlines())
    merged(once, folder, into=tmp_path / "again.json")  # the reports are known
    assert (tmp_path / "again.json").read_bytes() == twice.read_bytes()


def test_a_rank_without_a_timeline_has_its_report(tmp_path: Path) -> None:
    path = write_job(tmp_path, three_ranks(), TWO_HOSTS)
    (tmp_path / "t.json.rank2").unlink()
    folder = write_reports(tmp_path / "dump", [None, None, WITH_LOST[2]], FAILED_AT, TWO_HOSTS)
    for _ in range(2):  # beside the files of ranks, and beside that of hvdrun
        trace = opened(path, folder)
        assert [(row.rank, len(row.operations), row.ending is None) for row in trace.rows] == [
            (0, 8, True),
            (1, 8, True),
            (2, 8, False),
        ]
        assert not trace.lacks
        assert merged(path, folder, into=tmp_path / "job.json")
        merge_timelines(path)


def test_reports_of_another_process_are_refused(tmp_path: Path) -> None:
    path, folder = write_job(tmp_path, three_ranks()), write_reports(tmp_path / "dump", WITH_LOST, FAILED_AT)
    file = folder / "rank1.json"
    file.write_text(file.read_text().replace('"pid": 101', '"pid": 999'))
    assert refused(path, folder) == (
        f"{tmp_path}/t.json.rank1 and {file} are of two processes of rank 1: name the files of one job"
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"rank": 0}',
        '{"rank": ',
        '{"rank": ' + "9" * 400 + "}",
        failure_report(0, 1, [LOST], FAILED_AT).replace('"submitted_ns"', '"submitted"'),
        failure_report(0, 1, [LOST], FAILED_AT).replace('"monotonic_ns"', '"monotonic"'),
        failure_report(0, 1, [LOST], FAILED_AT).replace('"name": "c"', '"name": 3'),
        failure_report(0, 1, [LOST], FAILED_AT).replace('"rank": 0', '"rank": 99999999'),
    ],
)
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "rank0.json").write_text(text)
    assert refused(tmp_path).startswith(f"{path} is no failure report of ")


def test_a_report_whose_generation_is_unknown_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.json.worker0.generation1").write_text(timeline(0, three_ranks()[0], HERE, 2))
    (tmp_path / "t.json.worker1.generation1").write_text(timeline(1, three_ranks()[1], HERE, 2))
    folder = write_reports(tmp_path / "dump", [WITH_LOST[0], None, WITH_LOST[2]], FAILED_AT)
    trace = opened(tmp_path / "t.json", folder)
    assert trace.lacks == ["rank2.json is left out: no timeline tells the generation of its process"]
    assert [row.ending is not None for row in trace.rows] == [True, False]


def mismatch(size: int, ended: int, line: int) -> list[Call]:
    return [
        Call("loss", 0, 100, ended, ended, bytes=size, fused=0, status="mismatch", error=ERROR, line=line)
    ]


@pytest.mark.parametrize("from_reports", [False, True])
def test_a_mismatch_has_both_values_and_the_lines(
    from_reports: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: Sequence[Sequence[Call]] = [mismatch(12, 200, 7), mismatch(16, 205, 7), mismatch(12, 210, 9)]
    path = write_reports(tmp_path, calls, 300) if from_reports else write_job(tmp_path, calls)
    found = report(capsys, path, code=1)
    assert rules(found)["mismatch"] == (
        "rank 0 has float32 of shape [3], rank 1 has float32 of shape [4]; hint; "
        "ranks 0-1 at train.py:7, rank 2 at train.py:9"
    )
    (failure,) = found["failures"]
    assert failure["error"] == ERROR
    assert [one["place"] for one in failure["submitted"]] == ["at train.py:7"] * 2 + ["at train.py:9"]
    events = merged(path, into=tmp_path / "job.json")
    instants = [event for event in events if event["name"] == "mismatch"]
    assert [(event["pid"], int(event["ts"]), event["ph"]) for event in instants] == [
        (0, 200, "i"),
        (1, 205, "i"),
        (2, 210, "i"),
    ]
    assert instants[2]["args"] == {
        "operation": "loss",
        "error": ERROR,
        "submitted": ", ".join(
            f"rank {rank} all-reduce of {size} bytes" for rank, size in enumerate((12, 16, 12))
        ),
        "place": "at train.py:9",
    }
    merged(tmp_path / "job.json", into=tmp_path / "twice.json")
    twice = check_trace((tmp_path / "twice.json").read_text())
    assert [event for event in twice if event["name"] == "mismatch"] == instants


def test_a_meter_tells_the_share_of_all_files(tmp_path: Path) -> None:
    shown: list[str] = []
    calls = [Call("a", plan, plan * 100, plan * 100 + 10, plan * 100 + 20) for plan in range(1, 3000)]
    path = write_job(tmp_path, [calls, calls])
    read_trace(find_sources([path]), shown.append)
    assert shown[0] == "reading t.json: 0 %"
    first = [text for text in shown if text.startswith("reading t.json: ")]
    assert len(first) > 1
    assert "reading t.json.rank1: 50 %" in shown
    shares = [int(text.split(": ")[1].removesuffix(" %")) for text in shown]
    assert shares == sorted(shares)
    assert len(set(shares)) > 3
    lines = Meter("reading", [], shown.append).lines(EventFile(path))
    assert len(list(lines)) == len(list(EventFile(path)))  # without sizes it shows what it can
