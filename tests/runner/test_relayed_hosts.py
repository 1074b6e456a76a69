"""Hosts of large jobs, which hvdrun reaches over the agents of other hosts: their ranks, and their loss."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import FAILSAFE_SECONDS, Hosts, Script, Start, read_pids
from remote_processes import LONG, agents_of, all_processes, finish, wait_until_nothing_is_left

Cluster = Callable[..., Path]

# hvdrun that holds so many hosts itself.
LIMITED = """
import sys
from sirtaki.runner.cli import hvdrun
from sirtaki.runner.hosts import host_connection
host_connection.AT_A_TIME = int(sys.argv.pop(1))
sys.exit(hvdrun.main())
"""


@pytest.fixture
def cluster(hosts: Hosts, environment: dict[str, str]) -> Cluster:
    """Returns a function that makes hosts h1, h2, ..., which reach each other over the stand-in for ssh.

    Its other arguments are the behaviours of some of them. It returns the folder of all.
    """
    environment["HOSTNAME"] = "here"
    known = {name: environment[name] for name in ("PATH", "SSH_STAND_IN")}

    def make(count: int, **behaviours: dict[str, object]) -> Path:
        usual = {f"h{number}": {"environment": known} for number in range(1, count + 1)}
        return hosts(**{**usual, **behaviours})

    return make


def limited(limit: int, *arguments: str) -> list[str]:
    return [sys.executable, "-c", LIMITED, str(limit), *arguments]


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Returns a function that starts an hvdrun that holds so many hosts itself; ends it after the test."""
    with contextlib.ExitStack() as started:

        def begin(limit: int, *arguments: str) -> subprocess.Popen[bytes]:
            null, pipe = subprocess.DEVNULL, subprocess.PIPE
            process = subprocess.Popen(
                limited(limit, *arguments), env=environment, stdin=null, stdout=pipe, stderr=pipe
            )
            started.callback(process.communicate, timeout=FAILSAFE_SECONDS)
            started.callback(process.kill)
            return process

        yield begin


def run(limit: int, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        limited(limit, *arguments),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )


def list_of(count: int) -> str:
    return ",".join(f"h{number}:1" for number in range(1, count + 1))


def logins(homes: Path) -> set[str]:
    """Returns from where ssh has reached each host: "here>h1"."""
    return set((homes / "logins").read_text().split())


def test_ranks_behind_other_hosts_meet_those_of_all_hosts(
    environment: dict[str, str], rank_script: Script, cluster: Cluster
) -> None:
    homes = cluster(5)
    script = rank_script("print(b''.join(connect().all_gather(b'%d' % rank)).decode())")
    result = run(2, environment, "-H", f"localhost:1,{list_of(5)}", "python", script)
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] 012345" for rank in range(6)], result.stderr
    assert result.returncode == 0
    assert logins(homes) == {"here>h1", "here>h2", "h1>h3", "h2>h4", "h1>h5"}
    wait_until_nothing_is_left([], homes)


def test_a_lot_of_output_comes_over_whole(
    environment: dict[str, str], cluster: Cluster, tmp_path: Path
) -> None:
    cluster(3)
    count, kept = 100_000, tmp_path / "out"
    result = run(1, environment, "-H", list_of(3), "--output-filename", str(kept), "seq", str(count))
    assert result.returncode == 0, result.stderr
    for rank in range(3):
        lines = [line[4:] for line in result.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [str(number) for number in range(1, count + 1)]
        assert (kept / f"rank.{rank}" / "stdout").read_text().splitlines() == lines


def test_hosts_that_others_do_not_reach_are_reached_from_here(
    environment: dict[str, str], cluster: Cluster
) -> None:
    nowhere = {"environment": {"PATH": "/nowhere"}}  # there is no ssh
    homes = cluster(4, h1=dict(nowhere), h2=dict(nowhere))
    result = run(2, environment, "--verbose", "-H", list_of(4), "/bin/echo", "hello")
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] hello" for rank in range(4)], result.stderr
    assert logins(homes) == {"here>h1", "here>h2", "here>h3", "here>h4"}
    assert "2 hosts were not reached over others" in result.stderr
    assert "[h" not in result.stderr  # what they said there is not shown
    assert result.returncode == 0


def test_a_host_that_nobody_reaches_is_named(environment: dict[str, str], cluster: Cluster) -> None:
    denied = "ada@h3: Permission denied (publickey,password).\n"
    homes = cluster(3, h3={"exit_code": 255, "stderr": denied})
    result = run(2, environment, "-H", list_of(3), "echo", "hello")
    assert (result.returncode, result.stdout) == (1, "")
    assert "hvdrun: h3 does not let you in without a password" in result.stderr
    assert logins(homes) == {"here>h1", "here>h2", "h1>h3", "here>h3"}
    wait_until_nothing_is_left([], homes)


@pytest.mark.parametrize(
    ("victim", "lost"),
    [("hvdrun", ""), ("ssh of h1", "h1"), ("agent of h1", "h1"), ("ssh of h2", "h2"), ("agent of h2", "h2")],
)
def test_kill_9_leaves_nothing_anywhere(
    start: Start, rank_script: Script, cluster: Cluster, tmp_path: Path, victim: str, lost: str
) -> None:
    homes = cluster(3)
    process = start(1, "-H", f"localhost:1,{list_of(3)}", "python", rank_script(LONG))
    pids = read_pids(tmp_path, 8)
    if victim == "hvdrun":
        process.kill()
    elif victim.startswith("ssh"):
        os.kill(int((homes / lost / "ssh.pid").read_text()), signal.SIGKILL)
    else:
        home = os.fsencode(f"HOME={homes / lost}\0")
        agents = agents_of(homes)  # whose end ends the others
        for agent in [pid for pid in agents if home in Path(f"/proc/{pid}/environ").read_bytes()]:
            os.kill(agent, signal.SIGKILL)
    exit_code, stderr = finish(process)
    wait_until_nothing_is_left(pids, homes)
    if lost:
        assert exit_code == 1
        assert f"hvdrun: the host {lost} was lost, and rank {lost[1:]} with it: " in stderr


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_the_hosts_behind_others_and_the_key_is_no_argument(
    start: Start, rank_script: Script, cluster: Cluster, tmp_path: Path, number: int, exit_code: int
) -> None:
    homes = cluster(3)
    process = start(1, "-H", list_of(3), "python", rank_script(LONG))
    pids = read_pids(tmp_path, 6)
    keys = [file.read_text().strip() for file in homes.glob("*/sirtaki-*/key")]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert not any(keys[0].encode() in arguments for _, arguments in all_processes())
    process.send_signal(number)
    code, stderr = finish(process)
    assert code == exit_code
    assert "ending 3 ranks" in stderr
    assert stderr.count("Traceback") == (1 if number == signal.SIGINT else 0)
    wait_until_nothing_is_left(pids, homes)


def test_a_hundred_hosts_need_no_more_than_64_processes_of_ssh_on_one(
    environment: dict[str, str], cluster: Cluster
) -> None:
    homes = cluster(100)
    command = [sys.executable, "-m", "sirtaki.runner", "-H", list_of(100), "/bin/echo", "hello"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert sorted(result.stdout.splitlines()) == sorted(f"[{rank}] hello" for rank in range(100))
    assert result.returncode == 0, result.stderr
    assert logins(homes) == {f"here>h{number}" for number in range(1, 65)} | {
        f"h{number - 64}>h{number}" for number in range(65, 101)
    }
    assert max(Counter(one.partition(">")[0] for one in logins(homes)).values()) == 64
    wait_until_nothing_is_left([], homes)
