"""Failures, signals and the end of a job whose ranks run on other hosts: nothing is left on any host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, read_pids, wait_until
from remote_processes import FAMILY, LONG, agents_of, all_processes, finish, wait_until_nothing_is_left

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[bytes]]
Script = Callable[[str], str]
Hosts = Callable[..., Path]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_rank_that_fails_on_another_host_is_named(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={})
    script = "[ $SIRTAKI_RANK = 1 ] && echo reason >&2 && exit 3; exec sleep 300"
    result = hvdrun("-H", "localhost:1,hostB:2", "sh", "-c", script)
    assert result.returncode == 3
    lines = result.stderr.splitlines()
    assert re.fullmatch(r"hvdrun: rank 1 \(pid \d+ on hostB\) failed with exit code 3", lines[-1])
    assert lines[-3:-1] == ["hvdrun: the last lines that rank 1 wrote to its standard error:", "[1] reason"]


def test_a_rank_that_is_killed_on_another_host(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={})
    result = hvdrun("-H", "hostB:2", "sh", "-c", "[ $SIRTAKI_RANK = 1 ] && kill -KILL $$; exec sleep 300")
    assert result.returncode == 137
    assert re.search(r"rank 1 \(pid \d+ on hostB\) was killed by signal 9 \(SIGKILL\)", result.stderr)


def test_a_rank_of_another_host_that_does_not_come_is_named(
    hvdrun: Run, rank_script: Script, hosts: Hosts
) -> None:
    hosts(hostB={})
    script = rank_script("if rank == 1: time.sleep(300)\ninit()")
    result = hvdrun("--start-timeout", "0.5", "-H", "localhost:1,hostB:1", "python", script)
    assert result.returncode == 1
    assert re.search(r"hvdrun: rank 1 \(pid \d+ on hostB\) has not called hvd.init\(\)", result.stderr)


def test_grandchildren_on_other_hosts_end_with_the_job(
    hvdrun: Run, rank_script: Script, hosts: Hosts, tmp_path: Path
) -> None:
    homes = hosts(hostB={})
    assert hvdrun("-H", "localhost:1,hostB:1", "python", rank_script(FAMILY)).returncode == 0
    wait_until_nothing_is_left(read_pids(tmp_path, 4), homes)


@pytest.mark.parametrize("victim", ["hvdrun", "ssh", "agent"])
def test_kill_9_leaves_nothing_anywhere(
    start_hvdrun: Start, rank_script: Script, hosts: Hosts, tmp_path: Path, victim: str
) -> None:
    homes = hosts(hostB={}, hostC={})
    process = start_hvdrun("-H", "localhost:1,hostB:1,hostC:1", "python", rank_script(LONG))
    pids = read_pids(tmp_path, 6)
    assert len(list(homes.glob("*/sirtaki-*/key"))) == 2
    if victim == "hvdrun":
        process.kill()
    elif victim == "ssh":
        os.kill(int((homes / "hostB" / "ssh.pid").read_text()), signal.SIGKILL)
    else:
        home = os.fsencode(homes / "hostB")
        for agent in agents_of(homes):
            if home in Path(f"/proc/{agent}/environ").read_bytes():
                os.kill(agent, signal.SIGKILL)
    exit_code, stderr = finish(process)
    wait_until_nothing_is_left(pids, homes)
    if victim != "hvdrun":
        assert exit_code == 1
        assert "hvdrun: the host hostB was lost, and rank 1 with it: " in stderr


def test_a_lost_connection_names_the_host_and_its_ranks(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={"breaks_after": "hello"})
    result = hvdrun("-H", "localhost:1,hostB:2", "sh", "-c", "echo hello; exec sleep 300")
    assert result.returncode == 1
    why = "the ssh connection to it broke (ssh ended with exit code 255)"
    assert (
        result.stderr.splitlines()[-1] == f"hvdrun: the host hostB was lost, and ranks 1 and 2 with it: {why}"
    )


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_reach_all_hosts(
    start_hvdrun: Start, rank_script: Script, hosts: Hosts, tmp_path: Path, number: int, exit_code: int
) -> None:
    homes = hosts(hostB={})
    process = start_hvdrun("-H", "hostB:2,localhost:1", "python", rank_script(LONG))
    pids = read_pids(tmp_path, 6)
    process.send_signal(number)
    code, stderr = finish(process)
    assert code == exit_code
    assert "ending 3 ranks" in stderr
    assert stderr.count("Traceback") == (1 if number == signal.SIGINT else 0)
    wait_until_nothing_is_left(pids, homes)


def test_ctrl_z_and_fg_reach_all_hosts(
    start_hvdrun: Start, rank_script: Script, hosts: Hosts, tmp_path: Path
) -> None:
    homes = hosts(hostB={})
    process = start_hvdrun("-H", "localhost:1,hostB:1", "python", rank_script(LONG))
    pids = read_pids(tmp_path, 4)
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: {state_of(pid) for pid in [*pids, process.pid]} == {"T"}, "all are stopped")
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: "T" not in {state_of(pid) for pid in pids}, "all go on")
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    wait_until_nothing_is_left(pids, homes)


def test_a_reader_that_has_seen_enough_ends_the_job(start_hvdrun: Start, hosts: Hosts) -> None:
    homes = hosts(hostB={})
    process = start_hvdrun("-H", "localhost:1,hostB:1", "yes")
    assert process.stdout is not None
    assert process.stdout.read(100)
    process.stdout.close()
    assert process.wait(FAILSAFE_SECONDS) == 141
    wait_until_nothing_is_left([], homes)


def test_ctrl_c_while_hosts_are_awaited(start_hvdrun: Start, hosts: Hosts) -> None:
    homes = hosts(hostB={"hangs": True})
    process = start_hvdrun("-H", "hostB:1", "true")
    wait_until((homes / "hostB" / "ssh.pid").exists, "ssh has started")
    process.send_signal(signal.SIGINT)
    exit_code, stderr = finish(process)
    assert exit_code == 130
    assert "hvdrun: interrupted before any rank was started" in stderr
    wait_until_nothing_is_left([int((homes / "hostB" / "ssh.pid").read_text())], homes)


def test_the_key_is_in_no_argument_and_no_environment(
    start_hvdrun: Start, rank_script: Script, hosts: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    homes = hosts(hostB={})
    (homes / "here").mkdir()
    environment |= {"TMPDIR": str(homes / "here"), "SECRET_OF_USER": "hush-hush"}
    process = start_hvdrun("--verbose", "-H", "localhost:1,hostB:1", "python", rank_script(LONG))
    pids = read_pids(tmp_path, 4)
    keys = [file.read_text().strip() for file in homes.glob("*/sirtaki-*/key")]
    assert len(keys) == 2
    assert keys[0] == keys[1]
    for file in homes.glob("*/sirtaki-*/key"):
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    for pid, arguments in all_processes():
        assert keys[0].encode() not in arguments
        assert b"hush-hush" not in arguments
        try:
            assert keys[0].encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # the process has just ended
            continue
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=FAILSAFE_SECONDS)
    assert keys[0].encode() not in stdout + stderr
    assert b"hush-hush" not in stdout + stderr
    wait_until_nothing_is_left(pids, homes)
