"""`hvdrun --debug-rank`: all ranks wait for a rank that has the terminal, or waits for a debugger."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, HVDRUN, Hosts, Run

# Rank 1 stops at a breakpoint, then for longer than the stall deadline; rank 0 waits for it, and then until
# hvdrun has the terminal again.
TRAINING = """
import os, sys, time
import numpy
import sirtaki.numpy as hvd

hvd.init()
rank = answer = hvd.rank()
if rank == {debugged}:
    breakpoint()
    time.sleep(3)
print(f"rank {{rank}} has", hvd.allreduce(numpy.array([answer]), op=hvd.Sum)[0], flush=True)
hvd.shutdown()
if rank != {debugged}:
    terminal = os.open("/dev/tty", os.O_RDWR)
    while os.tcgetpgrp(terminal) != os.getpgid(os.getppid()):
        time.sleep(0.01)
    print("the terminal is hvdrun's", flush=True)
"""


@pytest.mark.parametrize(("size", "debugged"), [(2, 1), (3, 0)])
def test_pdb_on_one_rank(tmp_path: Path, environment: dict[str, str], size: int, debugged: int) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING.format(debugged=debugged))
    variables = {**environment, "SIRTAKI_STALL_DEADLINE": "1", "SIRTAKI_STALL_REPORT": "0.5"}
    command = [*HVDRUN, "-np", str(size), "--debug-rank", str(debugged), "python", str(script)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, variables)
    (failsafe := threading.Timer(FAILSAFE_SECONDS, os.kill, (pid, signal.SIGKILL))).start()
    shown, has_answered = b"", False
    try:
        while part := os.read(terminal, 65536):
            shown += part
            if b"(Pdb)" in shown and not has_answered:
                has_answered = True
                os.write(terminal, b"answer = 40\nc\n")
    except OSError:  # the terminal's signal that all have closed it
        pass
    failsafe.cancel()
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown
    assert has_answered, shown
    total = 40 + sum(rank for rank in range(size) if rank != debugged)
    assert shown.count(b"has %d\r\n" % total) == size, shown
    assert b"[%d] rank" % debugged not in shown  # its output is the terminal's own
    assert shown.count(b"the terminal is hvdrun's") == size - 1


DEBUGPY = """
def listen(address):
    print("listens at", address, flush=True)

def wait_for_client():
    print("waits", flush=True)
"""


def test_a_rank_waits_for_a_debugger(hvdrun: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "debugpy.py").write_text(DEBUGPY)
    script = tmp_path / "training.py"
    script.write_text(
        "import sirtaki.numpy as hvd\nhvd.init()\nprint('in', flush=True)\nhvd.shutdown()\nhvd.init()\n"
    )
    options = ("-np", "3", "--debug-rank", "1", "--debug-port", "5678")
    result = hvdrun(*options, "python", str(script), env={**environment, "PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    own = [line for line in result.stdout.splitlines() if line.startswith("[1]")]
    assert own == ["[1] listens at ('127.0.0.1', 5678)", "[1] waits", "[1] in"]
    assert result.stdout.count("waits") == 1
    assert "[1] sirtaki: rank 1 waits for a debugger at port 5678 of the loopback address" in result.stderr


def test_a_missing_debugger(hvdrun: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "debugpy.py").write_text("raise ImportError('none')")
    options = ("-np", "2", "--debug-rank", "0", "--debug-port", "5678")
    program = ("python", "-c", "import sirtaki.numpy as hvd; hvd.init()")
    result = hvdrun(*options, *program, env={**environment, "PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    assert "rank 0 cannot wait for a debugger (--debug-port): pip install debugpy" in result.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--debug-port", "5678"), "--debug-rank is missing"),
        (("--debug-rank", "1"), "--debug-rank needs a terminal as standard input"),
        (("--debug-rank", "1", "--debug-port", "5678", "--min-np", "1"), "is for jobs whose ranks stay"),
        (("--debug-rank", "one", "--debug-port", "5678"), "it takes the number of a rank"),
        (("--debug-rank", "2", "--debug-port", "5678"), "there is no rank 2"),
    ],
)
def test_wrong_options(hvdrun: Run, options: tuple[str, ...], text: str) -> None:
    result = hvdrun("-np", "2", *options, "python", "-c", "")
    assert result.returncode != 0
    assert text in result.stderr


def test_a_rank_without_the_terminal(tmp_path: Path, environment: dict[str, str], hosts: Hosts) -> None:
    """Only ranks of this host can have it."""
    hosts(nodeA={})
    command = [*HVDRUN, "-H", "localhost:1,nodeA:1", "--debug-rank", "1", "python", "-c", ""]
    ours, theirs = pty.openpty()
    result = subprocess.run(
        command, env=environment, stdin=theirs, capture_output=True, text=True, timeout=FAILSAFE_SECONDS
    )
    os.close(ours)
    os.close(theirs)
    assert result.returncode != 0
    assert "rank 1 of --debug-rank does not run on this host" in result.stderr
