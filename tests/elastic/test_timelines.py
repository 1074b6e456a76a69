"""Timelines of jobs whose ranks change: each process has a file for each generation and for its changes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elastic.running import FAILSAFE_SECONDS, PROGRAMS, QUICK, command, run_job, running_job
from timelines import check_trace, read_rows, read_trace, slices_named

from sirtaki.runner.observe.timeline import merge_timelines, remove_timelines

THREE = ("-np", "3", "--min-np", "1", *QUICK)
PHASES = ["AGREE", "REBUILD", "STATE"]


def row_names(generations: dict[int, list[int]], ranks: dict[tuple[int, int], int]) -> list[str]:
    """Returns the names of the rows of a merged file, by each worker's generations and its ranks there."""
    names = []
    for worker, numbers in generations.items():
        names.append(f"worker {worker}: changes of the ranks")
        names += [f"worker {worker}, generation {one}: rank {ranks[worker, one]}" for one in numbers]
    return names


def changes_of(*generations: int) -> list[str]:
    return [name for number in generations for name in (f"GENERATION {number}", *PHASES, "FIRST STEP")]


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
        expected = changes_of(*numbers)
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
    for result in job.results:  # each phase is a part of the seconds that the job has taken
        detected = {change["generation"]: change["detect_seconds"] for change in result["changes"]}
        assert all(0.0 <= seconds < FAILSAFE_SECONDS for seconds in detected.values())
        assert detected[min(detected)] == 0.0  # this process was new


def test_a_file_holds_all_workers_and_generations(tmp_path: Path) -> None:
    (tmp_path / "t.json.worker7.generation1").write_text("[\n{}\n]\n")  # files of another job
    (tmp_path / "t.json.rank1").write_text("[\n{}\n]\n")
    options = (*THREE, "--timeline-filename", str(tmp_path / "t.json"))
    job = run_job(options, "process_sets.py", 12, "0:step:4", HOLD="8:3")
    assert job.code == 0, job.text
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]
    line = f"the timeline of 4 workers in 3 generations is in {tmp_path}/t.json; https://ui.perfetto.dev"
    assert line in job.text.splitlines()[-1]
    rows = read_rows(tmp_path / "t.json")
    generations = {0: [1], 1: [1, 2, 3], 2: [1, 2, 3], 3: [3]}
    ranks = {(one, 1): one for one in range(3)}
    ranks |= {
        (result["worker"], change["generation"]): change["rank"]
        for result in job.results
        for change in result["changes"]
    }
    assert list(rows) == row_names(generations, ranks)
    for result in job.results:  # and no more digits than the format has
        row = rows[f"worker {result['worker']}: changes of the ranks"]
        seconds = {
            one["args"]["generation"]: float(one["dur"]) / 1e6 for one in row if one["name"] == "DETECT"
        }
        assert seconds == {
            one["generation"]: pytest.approx(one["detect_seconds"], abs=1e-9)
            for one in result["changes"]
            if one["detect_seconds"]
        }
    for worker, numbers in generations.items():
        row = rows[f"worker {worker}: changes of the ranks"]
        assert slices_named(row, "Changes of the ranks") == changes_of(*numbers)
        for number in numbers:
            row = rows[f"worker {worker}, generation {number}: rank {ranks[worker, number]}"]
            count = slices_named(row, "workers").count("all-gather")
            # The last ones of a killed process may not have been written; a failed one counts, if queued.
            assert count in ((range(5) if worker == 0 else (4, 5)) if number == 1 else (4,))


def rows_of_one_generation(path: Path) -> dict[str, list[Any]]:
    """Returns the rows of a job of three workers, which are those of its first generation."""
    rows = read_rows(path)
    assert list(rows) == row_names({0: [1], 1: [1], 2: [1]}, {(one, 1): one for one in range(3)})
    for worker in range(3):
        changes = slices_named(rows[f"worker {worker}: changes of the ranks"], "Changes of the ranks")
        assert changes == changes_of(1)
    return rows


def test_a_failed_job_leaves_its_timeline(tmp_path: Path) -> None:
    options = (*THREE, "--timeline-filename", str(tmp_path / "t.json"))
    job = run_job(options, "numpy_training.py", 60, 0.01, "1:raise-step:5")
    assert job.code == 1
    *_, notice, verdict = job.text.splitlines()
    assert notice.startswith(f"hvdrun: the timeline of 3 workers in 1 generation is in {tmp_path}/t.json;")
    assert "rank 1 failed with exit code 1" in verdict
    rows = rows_of_one_generation(tmp_path / "t.json")
    assert slices_named(rows["worker 1, generation 1: rank 1"], "gradient").count("all-reduce") == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_ended_leaves_its_timeline(tmp_path: Path, number: signal.Signals) -> None:
    options = (*THREE, "--timeline-filename", str(tmp_path / "t.json"))
    with running_job(tmp_path, command(options, "numpy_training.py", (100_000, 0.01)), TALK="1") as job:
        for rank in range(3):
            job.says(f"[{rank}] step 5")
        job.process.send_signal(number)
        ended = job.ended()
    assert ended.code == 128 + number
    assert "the timeline of 3 workers in 1 generation is in" in ended.text
    rows_of_one_generation(tmp_path / "t.json")


def test_a_spare_has_no_row_before_it_takes_a_place(tmp_path: Path) -> None:
    options = ("-np", "2", "--min-np", "1", "--spares", "1", *QUICK, "--timeline-filename")
    job = run_job((*options, str(tmp_path / "t.json")), "numpy_training.py", 60, 0.0, "1:step:5", HOLD="8:2")
    assert job.code == 0, job.text
    rows = read_rows(tmp_path / "t.json")
    assert {name.split(",")[0].split(":")[0] for name in rows} == {"worker 0", "worker 1", "worker 2"}
    assert slices_named(rows["worker 2: changes of the ranks"], "Changes of the ranks") == changes_of(3)


@pytest.mark.parametrize("name", ["no/folder/t.json", "folder"])
def test_a_timeline_that_cannot_be_written_is_refused_before_ranks_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    options = (*THREE, "--timeline-filename", str(tmp_path / name))
    job = run_job(options, "numpy_training.py", 60, 0.0, TALK="1")
    assert job.code == 1
    why = "No such file or directory" if name.startswith("no") else "it is no regular file"
    assert job.text == f"hvdrun: the timeline cannot be written to '{tmp_path / name}': {why}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_a_job_that_never_trains_has_no_timeline(tmp_path: Path) -> None:
    options = (*THREE, "--timeline-filename", str(tmp_path / "t.json"))
    job = run_job(options, "numpy_training.py", 60, 0.0, "1:raise-init:0")
    assert job.code == 1
    assert f"there is no timeline in {tmp_path}/t.json: no rank has begun to train" in job.text
    assert not (tmp_path / "t.json").exists()


# ---- Merging -------------------------------------------------------------------------------------------


def write_part(path: Path, pid: int, name: str, *lines: str) -> None:
    """Writes a part whose end is missing, as after SIGKILL."""
    head = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {"name": '"pid": 7'}},
        {"ph": "M", "name": "clock", "pid": pid, "tid": 0, "args": {"wall_minus_monotonic_ns": 10**9}},
    ]
    path.write_text("[\n" + ",\n".join([*map(json.dumps, head), *lines]))


def event(pid: int, moment: int) -> str:
    return f'{{"ph": "X", "name": "all-reduce", "pid": {pid}, "tid": 1, "ts": {moment}.000, "dur": 1.000}}'


def test_parts_are_merged_in_the_order_of_workers_and_generations(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("[\n{}\n]\n")  # an older result
    (tmp_path / "t.json.rank1").write_text("[\n{}\n]\n")  # of a job whose ranks do not change
    (tmp_path / "t.json.worker1.generation2.copy").write_text("")
    (tmp_path / "t.json.worker01.generation2").write_text("")
    write_part(tmp_path / "t.json.worker1.generation10", 0, "rank 0 (pid 5)", event(0, 30), event(0, 40)[:-9])
    write_part(tmp_path / "t.json.worker1.generation2", 3, "rank 3 (pid 5)", event(3, 10), event(3, 20))
    write_part(tmp_path / "t.json.worker1.changes", 1, "worker 1: changes of the ranks", event(1, 5))
    write_part(tmp_path / "t.json.worker10.generation2", 1, "rank 1 (pid 6)", event(1, 12), "{")
    write_part(tmp_path / "t.json.worker2.generation2", 2, "rank 2 (pid 7)", event(2, 12))
    others = [*tmp_path.glob("*.rank1"), *tmp_path.glob("*.copy"), *tmp_path.glob("*.worker01.*"), path]
    done = subprocess.run(
        [sys.executable, "-m", "sirtaki.runner.observe.timeline", str(path)],
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
        cwd=PROGRAMS,
    )
    assert (done.returncode, done.stdout) == (
        0,
        f"{path} holds the timelines of 3 workers in 2 generations\n",
    )
    assert set(tmp_path.iterdir()) == set(others)
    events = read_trace(path)
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert names == [
        "worker 1: changes of the ranks",
        "worker 1, generation 2: rank 3 (pid 5)",
        "worker 1, generation 10: rank 0 (pid 5)",
        "worker 2, generation 2: rank 2 (pid 7)",
        "worker 10, generation 2: rank 1 (pid 6)",
    ]
    found = [(one["pid"], int(one["ts"])) for one in events if one["ph"] == "X"]
    assert found == [(0, 5), (1, 10), (1, 20), (2, 30), (3, 12), (4, 12)]
    assert {one["args"]["name"] for one in events if one["name"] == "thread_name"} == {'"pid": 7'}


def test_all_files_of_another_job_are_removed(tmp_path: Path) -> None:
    for name in ("t.json", "t.json.rank3", "t.json.worker0.changes", "t.json.worker0.generation1", "t.jsonx"):
        (tmp_path / name).write_text("")
    remove_timelines(tmp_path / "t.json")
    assert [file.name for file in tmp_path.iterdir()] == ["t.jsonx"]
    assert merge_timelines(tmp_path / "t.json") == ""
