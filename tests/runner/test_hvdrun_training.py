"""hvdrun and `hvd.init()` together: for every failure in a rank, the right rank is named."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, Run, Script, Start, read_pids, script_writer

TRAINING = """
import os, signal, sys, time
import numpy
import sirtaki.numpy as hvd

hvd.init()
rank = hvd.rank()
for step in range(10**9):
    if step == 20 and rank == 1:
        {}
    hvd.allreduce(numpy.ones(3), name="x")
"""


@pytest.fixture
def training(tmp_path: Path) -> Callable[[str], str]:
    """Returns a function that writes a script whose rank 1 misbehaves at step 20, and returns its path."""
    return script_writer(tmp_path / "training.py", TRAINING)


@pytest.mark.parametrize(
    ("deed", "exit_code", "text"),
    [
        (
            "raise ValueError('no data')",
            1,
            r"failed with exit code 1: ValueError: no data \(at training.py:10\)",
        ),
        ("sys.exit(4)", 4, r"failed with exit code 4"),
        ("os._exit(5)", 5, r"failed with exit code 5"),
        (
            "os._exit(0)",
            1,
            r"ended with exit code 0, but without hvd.shutdown\(\), while another rank needed it",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"was killed by signal 9 \(SIGKILL\): often .* memory"),
    ],
    ids=["exception", "exit", "abrupt exit", "abrupt exit with 0", "kill"],
)
def test_the_rank_that_caused_the_end_is_named(
    hvdrun: Run, training: Script, deed: str, exit_code: int, text: str
) -> None:
    result = hvdrun("-np", "2", "python", training(deed))
    assert re.search(rf"hvdrun: rank 1 \(pid \d+\) {text}$", result.stderr.rstrip()), result.stderr
    assert result.returncode == exit_code


def test_ctrl_c_during_training(start_hvdrun: Start, training: Script, tmp_path: Path) -> None:
    process = start_hvdrun(
        "-np", "2", "python", training("print(os.getpid(), file=open('1.pid', 'w'))"), cwd=tmp_path
    )
    read_pids(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=FAILSAFE_SECONDS)
    assert process.returncode == 130
    assert stderr.count(b"Traceback") <= 1
    assert stderr.count(b"hvdrun: interrupted") == 1
    assert b"failed" not in stderr
