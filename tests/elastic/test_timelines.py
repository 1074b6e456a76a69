"""Timelines of jobs whose ranks change: each process has a file for each generation and for its changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from elastic.running import QUICK, run_job
from timelines import check_trace, read_trace, slices_named

THREE = ("-np", "3", "--min-np", "1", *QUICK)
PHASES = ["AGREE", "REBUILD", "STATE"]


def read_changes(path: Path) -> list[str]:
    """Returns the names of a process's changes and phases; the file has no end, as the format allows."""
    events = check_trace(path.read_text() + "]")
    return slices_named(events, "Changes of the ranks")


@pytest.mark.parametrize("starts", ["environment", "call"])
def test_a_timeline_goes_on_when_ranks_are_lost_and_join(tmp_path: Path, starts: str) -> None:
    path = tmp_path / "t.json"
    variables = {"SIRTAKI_TIMELINE": str(path)} if starts == "environment" else {"TIMELINE": str(path)}
    job = run_job(THREE, "process_sets.py", 12, "0:step:4", HOLD="8:3", **variables)
    assert job.code == 0, job.text
    assert {result["worker"] for result in job.results} == {1, 2, 3}
    generations = {0: [1], 1: [1, 2, 3], 2: [1, 2, 3], 3: [3]}
    files = {f"t.json.worker{one}.generation{number}" for one in generations for number in generations[one]}
    files |= {f"t.json.worker{one}.changes" for one in generations}
    assert {file.name for file in tmp_path.iterdir()} == files
    for worker, numbers in generations.items():
        expected = [name for number in numbers for name in (f"GENERATION {number}", *PHASES, "FIRST STEP")]
        if starts == "call":  # in the training function: the first change has been before
            expected = expected[1 + len(PHASES) :]
        assert read_changes(tmp_path / f"t.json.worker{worker}.changes") == expected
    for worker in (1, 2):
        parts = [read_trace(tmp_path / f"t.json.worker{worker}.generation{one}") for one in (1, 2, 3)]
        first, *others = [slices_named(part, "workers").count("all-gather") for part in parts]
        assert first in (4, 5)  # the failed one counts, if it could be queued
        assert others == [4, 4]


def test_the_changes_are_beside_the_failure_reports(tmp_path: Path) -> None:
    job = run_job(THREE, "process_sets.py", 12, "0:step:4", HOLD="8:3", SIRTAKI_DUMP_DIRECTORY=str(tmp_path))
    assert job.code == 0, job.text
    for result in job.results:
        written = json.loads((tmp_path / f"changes.worker{result['worker']}.json").read_text())
        assert written == result["changes"]
        assert all(change["first_step_seconds"] > 0 for change in written)
    lost = next(result for result in job.results if result["worker"] == 1)["changes"][1]
    assert lost["lost"] == [0]
    assert "SIGKILL" in lost["reason"]
