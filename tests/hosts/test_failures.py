"""Errors on the remaining ranks when a host, or the network to it, fails in the middle of training."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from .network import PATIENCE, Host, Network, finish, places, python

TRAINING = """
import sys
import numpy as np, sirtaki.numpy as hvd
hvd.init()
gradient = np.ones(100_000, np.float32)
hvd.allreduce(gradient, name="gradient")
print("training", flush=True)
try:
    while True:
        hvd.allreduce(gradient, name="gradient")
except hvd.HorovodInternalError as error:
    print(type(error).__name__, error)
"""

# The leader of the second host stops after it has passed on all messages.
STOPPED_LEADER = """
import os, signal
import numpy as np, sirtaki.numpy as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    hvd.allreduce(np.ones(4, np.float32), name="gradient")
except hvd.HorovodInternalError as error:
    print(type(error).__name__, error)
"""


def start_training(network: Network, key: Path, port: int, **settings: str) -> list[subprocess.Popen[str]]:
    """Starts one rank on each host; returns when all are training."""
    address = f"{network.hosts[0].address}:{port}"
    ranks = [
        host.start(*python(TRAINING), **variables, **settings)
        for host, variables in places(network.hosts, 1, address, key)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "training\n", finish(ranks)
    return ranks


def wait_for(rank: subprocess.Popen[str], words: str) -> str:
    """Returns the first line with these words that a rank writes to its error output."""
    assert rank.stderr is not None
    lines = []
    for line in rank.stderr:
        if words in line:
            return line
        lines.append(line)
    raise AssertionError(f"{words!r} is not in {lines}")


def processes_of(host: Host, words: str) -> list[int]:
    found = []
    for pid in host.processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if words in command:
            found.append(pid)
    return found


def test_a_cut_link_is_noticed_and_named_on_both_sides(fragile: Network, key_file: Path) -> None:
    ranks = start_training(fragile, key_file, 29_440, SIRTAKI_HEARTBEAT="3")
    fragile.hosts[1].cut()
    ended = finish(ranks)
    for rank, (code, output, errors) in enumerate(ended):
        assert code == 0, errors
        assert output.startswith("PeerLostError"), output
        other = fragile.hosts[1 - rank].name
        assert f"rank {1 - rank} (pid " in output, output
        assert f"on {other})" in output, output


def test_a_stopped_host_is_late_before_it_is_lost(fragile: Network, key_file: Path) -> None:
    ranks = start_training(
        fragile,
        key_file,
        29_441,
        SIRTAKI_HEARTBEAT="2",
        SIRTAKI_STALL_REPORT="1",
        SIRTAKI_STALL_DEADLINE="12",
        SIRTAKI_PROGRESS_DEADLINE="12",
    )
    stopped = fragile.hosts[1]
    for pid in processes_of(stopped, "python"):
        os.kill(pid, signal.SIGSTOP)
    line = wait_for(ranks[0], "rank 1 (pid ")
    assert f"on {stopped.name})" in line
    code, output, errors = finish(ranks[:1])[0]
    assert code == 0, errors
    assert output.startswith("DeadlineError"), output
    assert f"on {stopped.name})" in output
    ranks[1].kill()
    finish(ranks[1:])


def test_a_stopped_leader_is_named_beside_the_ranks_it_reports_for(fragile: Network, key_file: Path) -> None:
    settings = {"SIRTAKI_STALL_REPORT": "1", "SIRTAKI_STALL_DEADLINE": "8"}
    address = f"{fragile.hosts[0].address}:29443"
    ranks = [
        host.start(*python(STOPPED_LEADER), **variables, **settings)
        for host, variables in places(fragile.hosts, 2, address, key_file)
    ]
    stopped = ranks.pop(2)
    leader = f"rank 2 (pid {stopped.pid} on {fragile.hosts[1].name})"
    ended = finish(ranks)
    stopped.kill()
    stopped.communicate()
    for code, output, errors in ended:
        assert code == 0, errors
        assert output.startswith("DeadlineError"), output
        assert f"{leader} has not submitted it and does not answer. Is that process stopped?" in output
        assert f"does not answer. Is that process stopped, or {leader}, which reports for it?" in output
    assert f"neither {leader}, which reports for this rank, nor rank 0 (pid " in ended[2][2]


def test_a_host_that_goes_on_in_time_is_not_lost(fragile: Network, key_file: Path) -> None:
    ranks = start_training(fragile, key_file, 29_442, SIRTAKI_HEARTBEAT="2", SIRTAKI_STALL_REPORT="1")
    pids = processes_of(fragile.hosts[1], "python")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)  # three times the heartbeat
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1)
    assert [rank.poll() for rank in ranks] == [None, None]
    fragile.hosts[1].signal_all(signal.SIGKILL)
    code, output, errors = finish(ranks[:1])[0]
    assert code == 0, errors
    assert output.startswith("PeerLostError"), output
    ranks[1].wait(PATIENCE)
