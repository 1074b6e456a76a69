"""`sirtaki trace` on the timelines of real jobs with planted faults: it names the rank and the cause."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from timelines import check_trace

Command = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 8
TRAINING = """
import gc, os, signal, time
import numpy as np
import sirtaki.numpy as hvd

hvd.init()
late, place = hvd.rank() == 1, {place!r}
junk = [[] for _ in range(100_000)] if late and place == "collection" else []
gc.disable()


def collect():
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        gc.collect()


for step in range({steps}):
    if late and place == "before":
        time.sleep(0.2)
    if late and place == "collection":
        collect()
    first = hvd.allreduce_async(np.ones(1000), name="first")
    if late and place == "between":
        time.sleep(0.2)
    second = hvd.allreduce_async(np.ones(1000), name="second")
    first.wait(), second.wait()
{ending}
"""


@pytest.fixture
def timeline_of(tmp_path: Path, hvdrun: Command, environment: dict[str, str]) -> Callable[..., Path]:
    """Returns a function that runs a training of three ranks and returns its timeline."""

    def run(
        place: str = "nowhere",
        ending: str = "",
        code: int = 0,
        is_merged: bool = True,
        dump: Path | None = None,
    ) -> Path:
        (script := tmp_path / "train.py").write_text(TRAINING.format(place=place, steps=STEPS, ending=ending))
        path = tmp_path / "t.json"
        options = ("--timeline-filename", str(path)) if is_merged else ()
        variables = environment | ({} if is_merged else {"SIRTAKI_TIMELINE": str(path)})
        options += ("--dump-directory", str(dump)) if dump else ()
        command = ("-np", "3", *options, sys.executable, str(script))
        ended = hvdrun(*command, cwd=tmp_path, env=variables)
        assert ended.returncode == code, ended
        return path

    return run


@pytest.fixture
def trace(sirtaki: Command) -> Command:
    """Returns a function that runs `sirtaki trace` as a user does."""

    def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = sirtaki("trace", *arguments)
        assert (done.returncode, done.stderr) == (code, ""), done
        return done

    return run


def report(trace: Command, path: Path, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(trace("report", path, "--json", code=code).stdout)
    return found


@pytest.mark.parametrize(
    ("place", "text"), [("before", "before its first exchange"), ("between", "between exchanges")]
)
def test_a_slow_rank_is_named_with_the_part_of_its_step(
    timeline_of: Callable[..., Path], trace: Command, place: str, text: str
) -> None:
    found = report(trace, timeline_of(place))
    assert len(found["steps"]) == STEPS
    causes = [(step["critical_rank"], step["cause"]) for step in found["steps"]]
    assert causes.count((1, "late compute")) > STEPS / 2, causes
    assert found["ranks"][1]["caused_wait_seconds"] > 0.1 * STEPS
    warning = next(one for one in found["findings"] if one["what"].startswith("the others wait for rank 1 "))
    assert text in warning["remedy"]


def test_a_rank_that_collects_garbage_is_found_out(timeline_of: Callable[..., Path], trace: Command) -> None:
    found = report(trace, timeline_of("collection"))
    doings = {one["what"]: one["share"] for one in found["ranks"][1]["meanwhile"]}
    assert doings["garbage collection"] > 0.5, found["ranks"][1]
    (line,) = (what for what in doings if what.startswith("in collect() at train.py:"))
    assert doings[line] > 0.25, doings
    warning = next(one for one in found["findings"] if one["what"].startswith("the others wait for rank 1 "))
    assert "gc.freeze()" in warning["remedy"]


def test_a_rank_that_sleeps_is_named_with_its_line(timeline_of: Callable[..., Path], trace: Command) -> None:
    found = report(trace, timeline_of("before"))
    sleeping = TRAINING.splitlines().index("        time.sleep(0.2)") + 1
    doings = {one["what"]: one["share"] for one in found["ranks"][1]["meanwhile"]}
    assert doings[f"at train.py:{sleeping}"] > 0.5, found["ranks"][1]


def test_a_mismatch_has_what_each_rank_submitted(timeline_of: Callable[..., Path], trace: Command) -> None:
    ending = """
try:
    hvd.allreduce(np.ones(3 + hvd.rank() // 2), name="loss")
except hvd.MismatchError:
    hvd.barrier()
"""
    found = report(trace, timeline_of(ending=ending), code=1)
    (problem,) = (one for one in found["findings"] if one["level"] == "problem")
    assert (problem["rule"], problem["what"]) == ("mismatch", "the ranks disagree about 'loss'")
    values, hint, places = problem["evidence"].split("; ")
    assert re.sub(r" \(pid \d+ on [^)]*\)", "", values) == (
        "rank 0, rank 1 have float64 of shape [3], rank 2 has float64 of shape [4]"
    )
    assert hint == "every rank must pass the same shape"
    line = (
        (TRAINING + ending).splitlines().index('    hvd.allreduce(np.ones(3 + hvd.rank() // 2), name="loss")')
    )
    assert places == f"ranks 0-2 at train.py:{line}"  # the ending replaces the last line
    sizes = [(one["rank"], one["bytes"]) for one in found["failures"][0]["submitted"]]
    assert sizes == [(0, 24), (1, 24), (2, 32)]


def test_failure_reports_tell_the_end_of_a_job(
    timeline_of: Callable[..., Path], trace: Command, tmp_path: Path
) -> None:
    ending = """
hvd.barrier()
if late:
    raise ValueError("no more data")
hvd.allreduce(np.ones(3), name="loss")
"""
    path = timeline_of(ending=ending, code=1, dump=tmp_path / "dump")
    found = json.loads(trace("report", path, tmp_path / "dump", "--json", code=1).stdout)
    doing = {one["rank"]: one["doing"] for one in found["endings"]}
    assert all(text.startswith(f"rank {rank} (pid ") for rank, text in doing.items())
    assert {0, 2} <= doing.keys()
    (world,) = (one for one in found["findings"] if one["rule"] == "world-failed")
    assert "ValueError: no more data" in world["what"]
    assert len(found["steps"]) == STEPS
    trace("merge", path, tmp_path / "dump", "-o", tmp_path / "job.json")
    events = check_trace((tmp_path / "job.json").read_text())
    assert {event["pid"] for event in events if event["name"] == "the world failed"} == set(doing)


def test_a_killed_job_has_a_report(timeline_of: Callable[..., Path], trace: Command) -> None:
    ending = "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"  # files are written five times a second
    found = report(trace, timeline_of(ending=ending, code=128 + 9, is_merged=False))
    assert len(found["steps"]) == STEPS
    (warning,) = (one for one in found["findings"] if one["rule"] == "files-lack")
    for name in ("t.json", "t.json.rank1", "t.json.rank2"):
        assert f"{name} has no end: its process was killed" in warning["evidence"]


def test_a_merged_trace_keeps_the_rules_of_the_format(
    timeline_of: Callable[..., Path], trace: Command, tmp_path: Path
) -> None:
    path, job = timeline_of(), tmp_path / "job.json"
    done = trace("merge", path, "-o", job)
    assert done.stdout.splitlines()[0] == f"3 ranks, {3 * 2 * STEPS} operations"
    events = check_trace(job.read_text())
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert sum(event["ph"] == "s" for event in events) == 2 * 2 * STEPS  # two ranks to the last one
    assert {event["args"]["size"] for event in events if event["name"] == "world"} == {3}
    assert {event["args"]["error_ns"] for event in events if event["name"] == "clock"} == {0}


def test_a_planted_offset_is_found_within_the_stated_error(
    timeline_of: Callable[..., Path], trace: Command, tmp_path: Path
) -> None:
    planted = 123_456_789_012
    path, own = timeline_of(), tmp_path / "own.json"
    lines = []
    for line in path.read_text().splitlines():
        event = json.loads(line.rstrip(",")) if line.startswith("{") else {}
        if event.get("pid") == 2 and "ts" in event:  # moves a rank to a host of its own
            event["ts"] = event["ts"] + planted / 1000
        if event.get("pid") == 2 and event["name"] == "clock":
            event["args"]["wall_minus_monotonic_ns"] -= planted
        lines.append(f"{json.dumps(event)}," if event else line)
    own.write_text("\n".join(lines))
    clock = report(trace, own)["clocks"][1]
    assert clock["ranks"] == [2]
    rounding = 1e-5  # of times as floats
    assert abs(clock["offset_seconds"] + planted / 1e9) <= clock["error_seconds"] + rounding
