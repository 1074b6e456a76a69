"""Signals for hvdrun after its last rank has ended: they skip the ranks' output, and then the result, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, is_running, read_pids, wait_until

ELASTIC = ("--min-np", "1", "--reset-limit", "1")
PATIENT = (
    "import sys; from sirtaki.runner.supervise import main_loop; main_loop.RESULT_SECONDS = 100.0; "
    "from sirtaki.runner.cli.hvdrun import main; sys.exit(main())"
)
# Fails when it has written more than a pipe holds, and less than hvdrun keeps for its reader.
RANK = "echo $$ > {folder}/rank.pid; yes output | head -c 500000 >&2; exit 3"


@pytest.mark.parametrize("options", [(), ELASTIC], ids=["static", "elastic"])
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_after_the_end_leaves_the_result(
    environment: dict[str, str], tmp_path: Path, options: tuple[str, ...], signals: int
) -> None:
    command = ["-np", "1", *options, "sh", "-c", RANK.format(folder=tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", PATIENT, *command],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        [rank] = read_pids(tmp_path, 1)
        wait_until(lambda: not os.path.exists(f"/proc/{rank}") or not is_running(rank), "the rank has ended")
        wait_until(lambda: len(children_of(process.pid)) == 0, "all that it started has ended")
        process.send_signal(signal.SIGTERM)
        if signals == 2:
            wait_until(lambda: is_idle(process.pid), "the first signal is handled")
            process.send_signal(signal.SIGTERM)
            assert process.wait(FAILSAFE_SECONDS) == 3  # although nobody reads
        _, stderr = process.communicate(timeout=FAILSAFE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 3
    assert len(stderr) < 500_000  # the ranks' output is skipped
    last = stderr.decode().splitlines()[-1]
    assert last.endswith("failed with exit code 3") == (signals == 1), last


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_idle(pid: int) -> bool:
    """Returns whether a process has no pending signal: it has been taken."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return not any(line.startswith("ShdPnd:") and int(line.split()[1], 16) for line in lines)
