"""The end of the caller of sirtaki.run, and Ctrl-C, end all ranks."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, read_pids, read_terminal, wait_until
from remote_processes import wait_for_their_end

SCRIPT = """
import os
import pathlib
import signal
import sys
import time
import sirtaki

def work(folder):
    {0}
    rank = os.environ["SIRTAKI_RANK"]
    print("working")
    pathlib.Path(folder, f"{{rank}}.pid").write_text(f"{{os.getpid()}}\\n")
    time.sleep(300)

try:
    sirtaki.run(work, args=(os.path.dirname(__file__),), np=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""

Write = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Write:
    """Returns a function that writes a script whose ranks run a line first, and returns its path."""

    def write(line: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(line))
        return path

    return write


def start(script: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_an_interrupt_ends_the_ranks(script: Write, tmp_path: Path, environment: dict[str, str]) -> None:
    process = start(script("pass"), environment)
    pids = read_pids(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=FAILSAFE_SECONDS)
    assert out.splitlines()[-1] == "interrupted"
    assert process.returncode == 7
    assert "hvdrun: interrupted: ending 2 ranks (Ctrl-C again kills them at once)" in err.splitlines()
    assert "Traceback" not in err
    wait_for_their_end(pids)


def test_a_second_interrupt_kills_them(script: Write, tmp_path: Path, environment: dict[str, str]) -> None:
    process = start(script("signal.signal(signal.SIGINT, signal.SIG_IGN)"), environment)
    pids = read_pids(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "interrupted" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=FAILSAFE_SECONDS)
    assert out.splitlines()[-1] == "interrupted"
    wait_for_their_end(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_the_end_of_the_caller_ends_the_ranks(
    script: Write, tmp_path: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    (tmp_path / "temporary").mkdir()
    process = start(script("pass"), {**environment, "TMPDIR": str(tmp_path / "temporary")})
    pids = read_pids(tmp_path, 2)
    assert len(list((tmp_path / "temporary").glob("sirtaki-*/key"))) == 1
    process.send_signal(number)
    process.communicate(timeout=FAILSAFE_SECONDS)
    assert process.returncode == -number
    wait_for_their_end(pids)
    wait_until(lambda: not list((tmp_path / "temporary").glob("sirtaki-*")), "the key has been removed")


def test_a_terminal_shows_the_ranks_in_colour(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
import sirtaki
print("before")
print(sirtaki.run(lambda: print(sys.stdout.isatty()), np=1))
"""
    )
    ours, theirs = pty.openpty()
    environment["TERM"] = "xterm-256color"
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = read_terminal(ours).decode()
    os.close(ours)
    process.wait(timeout=FAILSAFE_SECONDS)
    lines = [line for line in shown.splitlines() if "hvdrun" not in line]
    assert lines == ["before", "\x1b[36m[0]\x1b[0m False", "[None]"]
