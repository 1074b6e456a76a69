"""The host discovery script: ranks join and leave as its answer changes; a bad answer changes nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from elastic.running import QUICK, check_exact, run_job

from sirtaki.runner.elastic.actions import Slot
from sirtaki.runner.elastic.discovery import Discovery
from sirtaki.runner.errors import LaunchError


def script(folder: Path, body: str) -> Path:
    """Writes an executable shell script."""
    path = folder / "discover.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def options(path: Path) -> tuple[str, ...]:
    return ("-np", "2", "--min-np", "1", "--max-np", "4", "--host-discovery-script", str(path), *QUICK)


def test_ranks_join_when_the_script_names_more_slots(tmp_path: Path) -> None:
    count = tmp_path / "count"
    path = script(
        tmp_path, f"echo run >> {count}; [ $(wc -l < {count}) -gt 2 ] && echo localhost:3 || echo localhost:2"
    )
    job = run_job(options(path), "numpy_training.py", 60, 0.0, HOLD="5:3")
    check_exact(job, 60, {0, 1, 2})
    assert "1 rank joins" in job.text
    assert "0 ranks were lost" in job.text


def test_ranks_leave_when_the_script_names_fewer_slots(tmp_path: Path) -> None:
    count = tmp_path / "count"
    path = script(
        tmp_path, f"echo run >> {count}; [ $(wc -l < {count}) -gt 2 ] && echo localhost:1 || echo localhost:2"
    )
    job = run_job(options(path), "numpy_training.py", 400, 0.02)
    check_exact(job, 400, {0})
    assert [result["worker"] for result in job.results] == [0]
    assert "rank 1 leaves" in job.text


@pytest.mark.parametrize("answer", ["echo ::::", "exit 3"])
def test_a_bad_answer_changes_nothing_and_is_told_once(answer: str, tmp_path: Path) -> None:
    count = tmp_path / "count"
    path = script(
        tmp_path,
        f"echo run >> {count}; [ $(wc -l < {count}) -gt 1 ] && {{ {answer}; exit; }}; echo localhost:2",
    )
    job = run_job(options(path), "numpy_training.py", 200, 0.03)
    check_exact(job, 200, {0, 1})
    assert job.text.count("the hosts stay as they are") == 1


def test_a_failure_of_the_first_run_ends_the_job(tmp_path: Path) -> None:
    job = run_job(options(script(tmp_path, "exit 7")), "numpy_training.py", 20, 0.0)
    assert job.code != 0
    assert "failed with exit code 7" in job.text


def test_a_script_that_does_not_end_is_killed(tmp_path: Path) -> None:
    said: list[str] = []
    discovery = Discovery(script(tmp_path, "echo localhost:1; exec sleep 1000"), 1, said.append)
    assert not list(discovery.poll(100.0))  # starts it
    assert not list(discovery.poll(105.0))
    assert not list(discovery.poll(111.0))
    discovery.close()
    assert said == ["the host discovery script has not ended within 10 s; the hosts stay as they are"]


def test_a_host_without_a_number_has_the_slots_of_the_option(tmp_path: Path) -> None:
    discovery = Discovery(script(tmp_path, "echo localhost"), 3, print)
    assert discovery.first() == [Slot("localhost", index) for index in range(3)]
    discovery.close()


def test_a_script_that_cannot_run_ends_the_job(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    path.write_text("no script")
    discovery = Discovery(path, 1, lambda text: None)
    with pytest.raises(LaunchError, match="cannot be run"):
        discovery.first()
    discovery.close()
