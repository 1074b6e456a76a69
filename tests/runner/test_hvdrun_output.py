"""Output of ranks arrives complete, in the right place, and byte for byte in files."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

from launching import FAILSAFE_SECONDS, HVDRUN, Run, Start, read_terminal


def test_both_streams_go_where_they_belong(hvdrun: Run) -> None:
    result = hvdrun("-np", "2", "sh", "-c", "echo out; echo err >&2")
    assert sorted(result.stdout.splitlines()) == ["[0] out", "[1] out"]
    assert [line for line in sorted(result.stderr.splitlines()) if line.startswith("[")] == [
        "[0] err",
        "[1] err",
    ]


def test_lines_are_never_mixed(hvdrun: Run) -> None:
    line = "(os.environ['SIRTAKI_RANK'] * 5000).encode() + b'\\n'"
    body = f"import os\nfor i in range(300): os.write(1 + i % 2, {line})"
    result = hvdrun(
        "-np",
        "3",
        "python",
        "-c",
        body,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        capture_output=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 900
    assert set(lines) == {f"[{rank}] {str(rank) * 5000}" for rank in range(3)}


def test_bytes_survive_and_a_progress_bar_becomes_lines(hvdrun: Run) -> None:
    body = "import os; os.write(1, b'\\xff\\n\\r 10%\\r 15%\\r 20%\\r\\nlast')"
    result = hvdrun("-np", "1", "python", "-c", body, text=False)
    assert result.stdout == b"[0] \xff\n[0]  10%\n[0]  20%\r\n[0] last\n"


def test_files_keep_the_exact_bytes(hvdrun: Run, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    body = "import os; os.write(1, b'\\xff\\ra\\r\\n\\0'); os.write(2, os.environ['SIRTAKI_RANK'].encode())"
    result = hvdrun("-np", "11", "--output-filename", str(folder), "python", "-c", body, text=False)
    assert result.returncode == 0
    assert result.stdout.count(b"\0") == 11
    for rank in range(11):
        assert (folder / f"rank.{rank:02d}" / "stdout").read_bytes() == b"\xff\ra\r\n\0"
        assert (folder / f"rank.{rank:02d}" / "stderr").read_bytes() == str(rank).encode()


def test_a_single_rank_has_files_too(hvdrun: Run, tmp_path: Path) -> None:
    assert hvdrun("-np", "1", "--output-filename", str(tmp_path), "echo", "x").returncode == 0
    assert (tmp_path / "rank.0" / "stdout").read_text() == "x\n"


def test_much_output_is_complete(hvdrun: Run) -> None:
    body = "import os; line = b'x' * 99 + b'\\n'\nfor _ in range(200): os.write(1, line * 500)"
    result = hvdrun("-np", "2", "python", "-c", body, text=False)
    assert len(result.stdout) == 2 * 200 * 500 * 104


def test_a_reader_that_has_seen_enough(environment: dict[str, str]) -> None:
    ranks = f"{sys.executable} -m sirtaki.runner -np 2 sh -c 'while :; do echo hello; done'"
    command = f"{ranks} | head -n 2; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
        check=False,
    )
    assert result.returncode == 141
    assert len(result.stdout.splitlines()) == 2
    assert "Traceback" not in result.stderr


def test_a_reader_that_leaves_after_the_ranks_have_ended(
    start_hvdrun: Start,
) -> None:
    process = start_hvdrun("-np", "1", "seq", "50000")
    assert process.stdout is not None
    process.stdout.read(10)
    time.sleep(0.5)
    process.stdout.close()
    assert process.wait(timeout=FAILSAFE_SECONDS) == 141


def test_a_full_disk_ends_the_job_with_a_reason(hvdrun: Run) -> None:
    with open("/dev/full", "wb") as full:
        result = hvdrun(
            "-np",
            "1",
            "sh",
            "-c",
            "echo x; exec sleep 60",
            stdout=full,
            stderr=subprocess.PIPE,
            capture_output=False,
        )
    assert result.returncode == 1
    assert "hvdrun: cannot write to standard output: No space left on device" in result.stderr


def test_on_a_terminal_each_rank_has_its_colour(environment: dict[str, str]) -> None:
    controller, terminal = pty.openpty()
    half, line = "sys.stdout.write('half\\r')", "print('line', os.environ['SIRTAKI_RANK'])"
    body = f"import os, sys; {half}; {line}"
    colours = {**environment, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    colours.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [*HVDRUN, "-np", "2", "python", "-c", body],
        env=colours,
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    shown = read_terminal(controller)
    os.close(controller)
    assert process.wait(timeout=FAILSAFE_SECONDS) == 0
    assert b"\x1b[36m[0]\x1b[0m half\r" in shown
    assert b"\x1b[35m[1]\x1b[0m line 1\r\n" in shown
    assert b"\x1b[K" in shown


def test_leftover_children_do_not_hold_up_the_end(hvdrun: Run) -> None:
    result = hvdrun("-np", "2", "sh", "-c", "sleep 300 & echo done")
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["[0] done", "[1] done"]


def test_children_that_left_their_group_do_not_hold_up_the_end(hvdrun: Run, tmp_path: Path) -> None:
    pid_file = tmp_path / "escaped.pid"
    escape = f"setsid sh -c 'echo $$ > {pid_file}; exec sleep 300' &"
    result = hvdrun(
        "-np", "1", "sh", "-c", f"{escape} until [ -s {pid_file} ]; do sleep 0.05; done; echo done"
    )
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert (result.returncode, result.stdout) == (0, "[0] done\n")
