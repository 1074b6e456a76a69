"""No process that hvdrun has started outlives it, however it ends."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from launching import (
    FAILSAFE_SECONDS,
    HVDRUN,
    Script,
    Start,
    is_running,
    read_pids,
    read_terminal,
    wait_until,
)
from remote_processes import FAMILY, finish, state_of, wait_for_their_end

from sirtaki.runner.launch.reaper import end_groups

Family = Callable[..., tuple[subprocess.Popen[bytes], list[int]]]


@pytest.fixture
def family(start_hvdrun: Start, rank_script: Script, tmp_path: Path) -> Family:
    """Returns a function that starts ranks with a child each; it returns hvdrun and all their processes."""

    def start(
        *options: str, begin: str = "", end: str = "time.sleep(300)", ranks: int = 2
    ) -> tuple[subprocess.Popen[bytes], list[int]]:
        process = start_hvdrun("-np", str(ranks), *options, "python", rank_script(begin + FAMILY + end))
        return process, read_pids(tmp_path, 2 * ranks)

    return start


@pytest.fixture
def temporary(tmp_path: Path, environment: dict[str, str]) -> Path:
    """Returns the folder in which hvdrun makes its private folder."""
    (tmp_path / "temporary").mkdir()
    environment["TMPDIR"] = str(tmp_path / "temporary")
    return tmp_path / "temporary"


@pytest.mark.parametrize("kind", ["running", "stopped", "deaf to SIGTERM"])
def test_kill_9_of_hvdrun_leaves_nothing(family: Family, temporary: Path, kind: str) -> None:
    begin = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if kind.startswith("deaf") else ""
    process, pids = family(begin=begin)
    assert len(list(temporary.glob("sirtaki-*/key"))) == 1
    if kind == "stopped":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    process.kill()
    wait_for_their_end(pids)
    wait_until(lambda: not list(temporary.iterdir()), "the key has been removed")


def guards_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Returns the children of hvdrun that run the reaper's file."""
    tasks = Path(f"/proc/{process.pid}/task")
    children = [pid for task in tasks.iterdir() for pid in read(task / "children").decode().split()]
    return [int(pid) for pid in children if b"reaper.py" in read(Path(f"/proc/{pid}/cmdline"))]


def read(file: Path) -> bytes:
    """Returns a file of /proc about a process; nothing if the process has ended meanwhile."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_the_guard_that_replaces_a_killed_one_needs_no_orders(tmp_path: Path) -> None:
    """Kills hvdrun as soon as there is another reaper, which must then know already what to clean up."""
    (tmp_path / "kept").mkdir()
    script = """
        import os, signal, sys
        from sirtaki.runner.launch.reaper import Reaper

        reaper = Reaper()
        reaper.watch_directory(sys.argv[1])
        os.kill(reaper.pid, signal.SIGKILL)
        os.waitid(os.P_PID, reaper.pid, os.WEXITED | os.WNOWAIT)
        reaper._send_order = lambda _: os._exit(0)
        reaper.replace_if_killed()
        os._exit(0)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "kept"],
        check=True,
        timeout=FAILSAFE_SECONDS,
    )
    wait_until(lambda: not (tmp_path / "kept").exists(), "the directory is gone")


@pytest.mark.parametrize("end", ["kill", "finish"])
def test_a_killed_guard_is_replaced(family: Family, temporary: Path, tmp_path: Path, end: str) -> None:
    """The new reaper knows what to clean up, and hvdrun monitors it, too."""
    process, pids = family(end="while not os.path.exists(f'{folder}/end'): time.sleep(0.01)\n")
    [reaper] = guards_of(process)
    os.kill(reaper, signal.SIGKILL)
    wait_until(lambda: guards_of(process) not in ([reaper], []), "another reaper has been started")
    if end == "kill":
        process.kill()
    else:
        (tmp_path / "end").write_text("")
        code, stderr = finish(process)
        assert code == 0
        assert stderr.count("was killed; another one replaces it") == 1
    wait_for_their_end(pids)
    wait_until(lambda: not list(temporary.iterdir()), "the key has been removed")


# hvd.init() of an elastic job handles SIGTERM. Its notice must not end the rank: the pipe is broken then.
INIT = """
import sys
import sirtaki.numpy as hvd
hvd.init()
sys.stderr = open(os.devnull, "w")
"""


@pytest.mark.parametrize(
    ("options", "begin"), [((), ""), (("--min-np", "1"), INIT)], ids=["static", "elastic"]
)
def test_ranks_end_although_both_hvdrun_and_its_guard_are_killed(
    options: Sequence[str], begin: str, family: Family, temporary: Path, tmp_path: Path
) -> None:
    process, pids = family(*options, begin=begin)
    children = {int(file.read_text()) for file in tmp_path.glob("child*.pid")}
    process.send_signal(signal.SIGSTOP)  # so that it cannot replace the reaper
    for reaper in guards_of(process):
        os.kill(reaper, signal.SIGKILL)
    process.kill()
    wait_for_their_end(list(set(pids) - children))
    for child in children:
        os.kill(child, signal.SIGKILL)


def test_whatever_lies_in_the_private_folder_goes_and_nothing_beyond(
    start_hvdrun: Start, rank_script: Script, tmp_path: Path, temporary: Path
) -> None:
    (tmp_path / "beyond").mkdir()
    (tmp_path / "beyond" / "data").write_text("precious")
    body = """
private = os.path.dirname(os.environ["SIRTAKI_KEY_FILE"])
os.makedirs(f"{private}/a/b")
open(f"{private}/a/b/file", "w").close()
os.symlink(os.path.dirname(__file__) + "/beyond", f"{private}/a/link")
os.symlink(os.path.dirname(__file__) + "/beyond", f"{private}/link")
"""
    code, stderr = finish(start_hvdrun("-np", "1", "python", rank_script(body)))
    assert code == 0, stderr
    assert list(temporary.iterdir()) == []
    assert (tmp_path / "beyond" / "data").read_text() == "precious"


def test_grandchildren_end_with_the_job(family: Family) -> None:
    process, pids = family(end="")
    assert finish(process)[0] == 0
    assert not any(is_running(pid) for pid in pids)


def test_grandchildren_end_with_a_failure(family: Family) -> None:
    fail = (
        "last = f'{folder}/child0.pid'\n"
        "while rank and not (os.path.exists(last) and os.path.getsize(last)): time.sleep(0.01)\n"
        "if rank: sys.exit(9)\n"
    )
    process, pids = family(end=fail + "time.sleep(300)")
    assert finish(process)[0] == 9
    assert not any(is_running(pid) for pid in pids)


def test_ctrl_c_ends_all_with_one_line_and_one_traceback(family: Family) -> None:
    process, pids = family(ranks=3)
    process.send_signal(signal.SIGINT)
    exit_code, stderr = finish(process)
    assert exit_code == 130
    assert stderr.count("KeyboardInterrupt") == 1
    assert "[0] KeyboardInterrupt" in stderr
    assert stderr.count("hvdrun: interrupted: ending 3 ranks") == 1
    assert "failed" not in stderr
    assert not any(is_running(pid) for pid in pids)


def test_a_second_ctrl_c_kills_at_once(family: Family, tmp_path: Path) -> None:
    stubborn = "signal.signal(signal.SIGINT, lambda *_: note(f'asked{rank}', 1))\n"
    process, pids = family(begin=stubborn, end="while True: time.sleep(1)")
    process.send_signal(signal.SIGINT)
    read_pids(tmp_path, 6)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert not any(is_running(pid) for pid in pids)


def test_sigterm_ends_all(family: Family) -> None:
    process, pids = family()
    process.terminate()
    exit_code, stderr = finish(process)
    assert exit_code == 143
    assert "hvdrun: terminated (SIGTERM): ending 2 ranks" in stderr
    assert not any(is_running(pid) for pid in pids)


def test_ranks_that_are_stopped_end_too(family: Family) -> None:
    process, pids = family()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert not any(is_running(pid) for pid in pids)


def test_a_rank_that_is_stopped_ends_by_its_own_handler(family: Family, tmp_path: Path) -> None:
    """A stopped process handles no signal but SIGKILL until it is continued: it would write no checkpoint."""
    handler = """
def leave(*_):
    open(f"{folder}/left{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
"""
    process, _ = family(begin=handler)
    for rank in range(2):
        os.kill(int((tmp_path / f"rank{rank}.pid").read_text()), signal.SIGSTOP)
    process.terminate()
    assert finish(process)[0] == 143
    assert sorted(file.name for file in tmp_path.glob("left*")) == ["left0", "left1"]


def test_the_guard_continues_what_is_stopped() -> None:
    """The kernel continues only orphaned groups, after a SIGHUP; the reaper continues processes itself."""
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    script = "trap 'exit 7' TERM; echo ready; read nothing"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(process.pid) == "T", "it has stopped")
        end_groups([process.pid])
        assert process.wait(FAILSAFE_SECONDS) == 7


def test_a_hang_up_is_passed_on(family: Family) -> None:
    process, pids = family()
    process.send_signal(signal.SIGHUP)
    exit_code, stderr = finish(process)
    assert exit_code == 129
    assert re.search(r"rank \d \(pid \d+\) was killed by signal 1 \(SIGHUP\)", stderr)
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("options", [(), ("--min-np", "1")], ids=["static", "elastic"])
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_the_ranks_handle_ends_nothing(
    family: Family, options: tuple[str, ...], number: signal.Signals
) -> None:
    """Job schedulers send one before the time is up, so that programs can write a checkpoint."""
    process, _ = family(*options, begin=f"signal.signal({int(number)}, lambda *_: sys.exit(0))\n")
    process.send_signal(number)
    assert finish(process)[0] == 0


def test_nohup_holds_for_the_ranks(start_hvdrun: Start, rank_script: Script, tmp_path: Path) -> None:
    script = rank_script(
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, signal.getsignal(signal.SIGPIPE))"
    )
    process = start_hvdrun(
        "-np", "1", "python", script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    stdout, _ = process.communicate(timeout=FAILSAFE_SECONDS)
    assert stdout.startswith(b"[0] True")


def test_keys_on_a_terminal(rank_script: Script, tmp_path: Path, environment: dict[str, str]) -> None:
    script = rank_script(FAMILY + "time.sleep(300)")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(HVDRUN[0], [*HVDRUN, "-np", "2", "python", script], environment)
    pids = [*read_pids(tmp_path, 4), pid]
    os.write(terminal, b"\x1a")  # Ctrl-Z
    wait_until(lambda: {state_of(each) for each in pids} == {"T"}, "all processes have stopped")
    os.kill(pid, signal.SIGCONT)  # like fg
    wait_until(lambda: "T" not in {state_of(each) for each in pids}, "all processes go on")
    os.write(terminal, b"\x03")  # Ctrl-C
    shown = read_terminal(terminal)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert shown.count(b"hvdrun: interrupted: ending 2 ranks") == 1
    assert shown.count(b"Traceback") == 1
    wait_for_their_end(pids[:-1])
