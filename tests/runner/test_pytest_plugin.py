"""The plugin of pytest: the body of a test on ranks, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS

HEAD = """
import os, time
import numpy, pytest
import sirtaki.numpy as hvd

def sum_of_ranks():
    hvd.init()
    return int(hvd.allreduce(numpy.array([hvd.rank()]), op=hvd.Sum)[0])
"""


def run_pytest(folder: Path, environment: dict[str, str], body: str) -> tuple[int, str]:
    """Runs the tests of a file; returns pytest's exit code and its output."""
    (folder / "conftest.py").write_text('pytest_plugins = ["sirtaki.pytest_plugin"]\n')
    (folder / "test_user.py").write_text(HEAD + body)
    command = [sys.executable, "-m", "pytest", "--strict-markers", "-p", "no:cacheprovider", str(folder)]
    options = {"env": environment, "capture_output": True, "text": True, "cwd": folder}
    done = subprocess.run([*command, "--rootdir", str(folder)], timeout=FAILSAFE_SECONDS, **options)
    return done.returncode, done.stdout + done.stderr


def test_bodies_run_on_ranks(tmp_path: Path, environment: dict[str, str]) -> None:
    body = """
@pytest.fixture
def offset(): return 10

@pytest.mark.ranks(3)
@pytest.mark.parametrize("factor", [1, 2])
def test_on_three(offset, factor, tmp_path):
    assert factor * (offset + sum_of_ranks()) == factor * 13
    (tmp_path / f"{hvd.rank()}").touch()
    hvd.barrier()
    assert len(list(tmp_path.iterdir())) == 3

class TestMethods:
    @pytest.mark.ranks(2)
    def test_on_two(self):
        assert sum_of_ranks() == 1

def test_without_ranks():
    assert "SIRTAKI_RANK" not in os.environ
"""
    exit_code, shown = run_pytest(tmp_path, environment, body)
    assert exit_code == 0, shown
    assert "4 passed" in shown


@pytest.mark.parametrize("in_ci", ["", "true"])
def test_a_failure_names_the_rank_once(in_ci: str, tmp_path: Path, environment: dict[str, str]) -> None:
    environment["CI"] = in_ci  # pytest then shows whole messages in its summary
    body = """
@pytest.mark.ranks(2)
def test_fails(tmp_path):
    total, sent = sum_of_ranks(), tmp_path / "sent"
    if hvd.rank() == 1 and seen(sent):
        assert total == 41
    rest = hvd.allreduce_async(numpy.ones(1), name="rest"); sent.touch(); hvd.synchronize(rest)  # rank 0

def seen(path):
    while not path.exists():
        time.sleep(0.01)
    return True
"""
    exit_code, shown = run_pytest(tmp_path, environment, body)
    assert exit_code == 1, shown
    assert "rank 1 (pid " in shown
    assert "raised AssertionError: assert 1 == 41" in shown
    assert shown.count("Traceback (most recent call last)") == 1, shown
    assert "assert total == 41" in shown
    assert "rank 0 (pid " in shown
    assert "test_user.py:15" in shown  # the line of rank 0


@pytest.mark.parametrize(
    ("line", "place"),
    [("while hvd.rank() == 1: pass", "test_user.py:13"), ("time.sleep(300)", "line 13 in test_hangs")],
    ids=["one", "all"],
)
def test_ranks_that_hang_end(tmp_path: Path, environment: dict[str, str], line: str, place: str) -> None:
    body = f"""
@pytest.mark.ranks(2, seconds=6)
def test_hangs():
    sum_of_ranks()
    {line}
    hvd.barrier()
"""
    exit_code, shown = run_pytest(tmp_path, environment, body)
    assert exit_code == 1, shown
    assert "1 failed" in shown
    assert place in shown


def test_a_fixture_that_cannot_be_sent(tmp_path: Path, environment: dict[str, str]) -> None:
    body = "@pytest.mark.ranks(2)\ndef test_user(request):\n    pass\n"
    exit_code, shown = run_pytest(tmp_path, environment, body)
    assert exit_code == 1, shown
    assert "1 failed" in shown
    assert "pickle" in shown


@pytest.mark.parametrize("arguments", ["0", "True", "2, seconds=0"])
def test_a_wrong_marker(tmp_path: Path, environment: dict[str, str], arguments: str) -> None:
    body = f"@pytest.mark.ranks({arguments})\ndef test_user():\n    pass\n"
    exit_code, shown = run_pytest(tmp_path, environment, body)
    assert exit_code == 1
    assert "it takes a number of ranks, 1 or more" in shown
