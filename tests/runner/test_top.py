"""`sirtaki top` beside jobs that run."""

from __future__ import annotations

import functools
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import TRAINING, Start, is_running, read_pids, read_terminal, script_writer, wait_until

from sirtaki.bindings.observing import watch_marks
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.top import jobs

Top = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def top(sirtaki: Top) -> Top:
    """Returns a function that runs `sirtaki top`, and returns its output."""
    return functools.partial(sirtaki, "top")


@pytest.fixture
def job(start_hvdrun: Start, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Returns hvdrun with a training of two ranks, which have begun."""
    script = script_writer(tmp_path / "training.py", TRAINING)("")
    started = start_hvdrun("-np", "2", "python", script, str(tmp_path))
    read_pids(tmp_path, 2)
    return started


def states_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Returns the lines of the ranks."""
    return [line for line in done.stdout.splitlines() if line.lstrip()[:1].isdecimal()]


def test_it_names_the_rank_that_others_wait_for(job: Any, top: Top, tmp_path: Path) -> None:
    found: list[str] = []

    def is_named() -> bool:
        found[:] = [*states_of(top(job.pid, "--once")), "", ""]
        return (
            "for rank 1 to submit 'loss'" in found[0]
            and "computes, at training.py:" in found[1]
            and "; others wait" in found[1]
        )

    wait_until(is_named, "rank 1 is named")
    (tmp_path / "go").touch()

    def run() -> bool:
        found[:] = states_of(top(job.pid, "--once"))
        return len(found) == 2 and all(line.rstrip().endswith("runs") for line in found)

    wait_until(run, "both ranks run")
    (tmp_path / "end").touch()
    assert job.wait() == 0


def test_a_stopped_rank_is_a_problem(job: Any, top: Top, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    wait_until(lambda: len(states_of(top(job.pid, "--once"))) == 2, "both ranks have written their states")
    pid = int((tmp_path / "1.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        done = top(pid, "--once")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert done.returncode == 1, done.stderr
    assert "is stopped: continue it with `kill -CONT`" in states_of(done)[1]
    (tmp_path / "end").touch()
    assert job.wait() == 0


def test_lines_of_json_are_recorded_and_shown_again(job: Any, top: Top, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    record = tmp_path / "record"
    done = top(job.pid, "--json", "--once", "--record", record)
    assert done.stdout == record.read_text(), done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert all(json.loads(line)["schema"] == 2 for line in done.stdout.splitlines())
    found: list[dict[str, Any]] = []

    def count_grows() -> bool:
        found[:] = map(json.loads, top(job.pid, "--json", "--once").stdout.splitlines())
        counts = [[rank["operations"] for rank in one["ranks"]] for one in found]
        return len(counts) == 2 and len(counts[1]) == 2 and all(map(int.__lt__, *counts))

    wait_until(count_grows, "both ranks count more operations")
    assert [rank["rank"] for rank in found[1]["ranks"]] == [0, 1]
    (tmp_path / "end").touch()
    assert job.wait() == 0
    assert top("--replay", record, "--json").stdout == done.stdout
    assert "ranks are up" in top("--replay", record).stdout


def test_a_terminal_shows_the_job_until_it_ends(
    job: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    here, there = pty.openpty()
    command = [sys.executable, "-m", "sirtaki", "top", str(job.pid)]
    env = {**environment, "COLUMNS": "160", "LINES": "40", "TERM": "xterm"}
    with subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=env) as process:
        os.close(there)
        shown = b""
        while b"op/s" not in shown:
            shown += os.read(here, 65536)  # raises OSError if the process ends
        (tmp_path / "end").touch()
        shown += read_terminal(here)
    os.close(here)
    assert "this was the last look" in shown.decode()
    assert process.returncode == 0
    assert job.wait() == 0


def test_a_process_that_is_no_rank_is_refused(top: Top) -> None:
    done = top(os.getpid())
    assert done.returncode == 2
    assert f"process {os.getpid()} has no ranks of a job on this host" in done.stderr


def test_a_folder_that_is_no_jobs_is_refused(top: Top, tmp_path: Path) -> None:
    done = top(tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} is no folder of a job that runs on this host" in done.stderr


def test_a_broken_recording_is_refused_with_its_line(top: Top, tmp_path: Path) -> None:
    file = tmp_path / "record"
    file.write_text("nonsense\n")
    done = top("--replay", file)
    assert done.returncode == 2
    assert f"{file}:1 cannot be shown" in done.stderr
    file.write_text("")
    assert "has no snapshots" in top("--replay", file).stderr


def test_without_a_job_and_with_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(jobs, "_folders_of", lambda processes: folders)
    with pytest.raises(LaunchError, match="no job of yours has ranks on this host"):
        jobs.find_job(None)
    folders += [tmp_path / "sirtaki-a", tmp_path / "sirtaki-b"]
    with pytest.raises(LaunchError, match=f"several jobs .*sirtaki top {folders[0]}"):
        jobs.find_job(None)
    del folders[1]
    folders[0].mkdir(0o700)
    (folders[0] / "key").touch()
    found = jobs.find_job(None)
    assert found.folder == folders[0]
    assert watch_marks.is_watched(found.folder / watch_marks.FOLDER)


def test_a_job_is_found_by_hvdrun_although_one_of_its_ranks_has_ended(
    start_hvdrun: Start, top: Top, tmp_path: Path
) -> None:
    body = "hvd.init(); hvd.shutdown(); (folder / f'{rank}.pid').write_text(f'{os.getpid()}\\n')"
    script = tmp_path / "training.py"
    lines = [
        "import os, pathlib, sys, time",
        "import sirtaki.numpy as hvd",
        "folder = pathlib.Path(sys.argv[1])",
    ]
    lines += ["rank = int(os.environ['SIRTAKI_RANK'])", body, "while rank and not (folder / 'end').exists():"]
    script.write_text("\n".join([*lines, "    time.sleep(0.02)"]))
    job = start_hvdrun("-np", "2", "python", str(script), str(tmp_path))
    wait_until(lambda: not all(map(is_running, read_pids(tmp_path, 2))), "rank 0 has ended")
    assert "has no ranks" not in top(job.pid, "--once").stderr
    (tmp_path / "end").touch()
    assert job.wait() == 0


def test_a_mark_of_a_watcher_ends_by_itself(tmp_path: Path) -> None:
    assert not watch_marks.is_watched(tmp_path)
    mark = tmp_path / watch_marks.FOR_NOW
    mark.touch()
    assert watch_marks.is_watched(tmp_path)
    old = mark.stat().st_mtime - watch_marks.FOR_NOW_SECONDS
    os.utime(mark, (old, old))
    assert not watch_marks.is_watched(tmp_path)
    (tmp_path / watch_marks.ALWAYS).touch()
    assert watch_marks.is_watched(tmp_path)
