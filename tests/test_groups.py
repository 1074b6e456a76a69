"""Tests that share what is expensive to start: all of them run in one process of pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.fixture
def network():
    pass

@pytest.fixture
def spark():
    pass

@pytest.mark.parametrize("number", range(8))
def test_something(number, {fixture}):
    pass
"""


@pytest.mark.parametrize("fixture", ["run_case", "run_case_in_keras", "network", "spark"])
def test_one_process_runs_all_tests_that_share(fixture: str, tmp_path: Path) -> None:
    (tmp_path / "test_sharing.py").write_text(TESTS.format(fixture=fixture))
    assert len(processes(tmp_path)) == 1


def test_other_tests_are_distributed(tmp_path: Path) -> None:
    (tmp_path / "test_apart.py").write_text(TESTS.format(fixture="tmp_path"))
    assert len(processes(tmp_path)) == 2


def processes(folder: Path) -> set[str]:
    """Runs the tests of a folder as `make test` does, on two processes; returns those that ran any."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-v", "--numprocesses", "2", "--dist", "loadgroup"]
    finished = subprocess.run(
        [*command, "-p", "conftest", "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": here},
        text=True,
        capture_output=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    ran = re.findall(r"^\[(gw\d)\] .*PASSED", finished.stdout, re.MULTILINE)
    assert len(ran) == 8
    return set(ran)
