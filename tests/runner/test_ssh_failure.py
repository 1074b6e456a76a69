"""Failures, signals and the end of a job whose ranks run on other hosts: nothing is left on any host."""

from __future__ import annotations

import signal
from pathlib import Path

from launching import FAILSAFE_SECONDS, Hosts, Run, Script, Start, read_pids, wait_until
from remote_processes import (
    FAMILY,
    LONG,
    all_processes,
    finish,
    state_of,
    wait_until_nothing_is_left,
)


def test_grandchildren_on_other_hosts_end_with_the_job(
    hvdrun: Run, rank_script: Script, hosts: Hosts, tmp_path: Path
) -> None:
    homes = hosts(hostB={})
    assert hvdrun("-H", "localhost:1,hostB:1", "python", rank_script(FAMILY)).returncode == 0
    wait_until_nothing_is_left(read_pids(tmp_path, 4), homes)


def test_a_lost_connection_names_the_host_and_its_ranks(hvdrun: Run, hosts: Hosts) -> None:
    hosts(hostB={"breaks_after": "hello"})
    result = hvdrun("-H", "localhost:1,hostB:2", "sh", "-c", "echo hello; exec sleep 300")
    assert result.returncode == 1
    why = "the ssh connection to it broke (ssh ended with exit code 255)"
    assert (
        result.stderr.splitlines()[-1] == f"hvdrun: the host hostB was lost, and ranks 1 and 2 with it: {why}"
    )


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
