"""Ranks link to each other when an operation first needs it, and hear of every failure without a link."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, hvdrun

HEAD = """
import os, signal, socket, sys, time
import numpy as np
import sirtaki.numpy as hvd
from sirtaki.bindings.context import current

def sockets():
    found = set()
    for one in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{one}")
        except FileNotFoundError:  # the one that lists them
            continue
        if name.startswith("socket:"):
            found.add((int(one), name))
    return found

hvd.init()
rank, size = hvd.rank(), hvd.size()
"""

# A link within a host is one socket. All others report to rank 0, which has a link to each from the start.
COUNTING = """
def links_of(operation):
    before = sockets()
    operation()
    return len(sockets()) - len(before)

def add_up():
    assert hvd.allreduce(np.full(1000, float(rank)), op=hvd.Sum).tolist() == [15.0] * 1000

def hand_out():
    assert hvd.broadcast(float(rank), root_rank=2) == 2.0

def collect():
    assert hvd.allgather(np.array([rank])).tolist() == list(range(6))

links = [links_of(operation) for operation in (add_up, hand_out, collect, collect)]
print(f"links of {rank}: {links}")
"""
# Around the ring, where the links are those of the start; to the root 2; to all others.
LINKS = {
    0: [0, 0, 0, 0],
    1: [0, 0, 3, 0],  # to 3, 4 and 5
    2: [0, 2, 0, 0],  # to 4 and 5
    3: [0, 0, 2, 0],  # to 1 and 5
    4: [0, 1, 1, 0],  # to 2; to 1
    5: [0, 1, 2, 0],  # to 2; to 1 and 3
}


def run(
    script: str, ranks: int, *arguments: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = hvdrun(
        ranks, sys.executable, "-c", HEAD + script, *arguments, SIRTAKI_TRANSPORT="socket", **environment
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_rank_links_only_to_those_with_whom_it_exchanges_bytes() -> None:
    ended = run(COUNTING, 6, SIRTAKI_CPU_ALGORITHM="ring")
    assert ended.returncode == 0, ended
    for rank, links in LINKS.items():
        assert f"[{rank}] links of {rank}: {links}" in ended.stdout, ended


def test_operations_of_several_process_sets_link_at_the_same_time() -> None:
    ended = run(
        """
sets = [hvd.add_process_set(members) for members in ([0, 2, 4], [1, 2, 3, 5], [3, 4, 5])]
mine = np.full(50_000, float(rank))
handles = [
    (one, hvd.allreduce_async(mine, op=hvd.Sum, process_set=one, name=f"{number} {turn}"))
    for turn in range(3) for number, one in enumerate(sets) if rank in one.ranks
]
for one, handle in handles:
    assert hvd.synchronize(handle).tolist() == [float(sum(one.ranks))] * 50_000
""",
        6,
    )
    assert ended.returncode == 0, ended


# The ranks 1 and 3 have no link when one of them ends.
@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_ends_before_it_is_linked_to_is_named_by_all(victim: int) -> None:
    ended = run(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.allgather(np.array([rank]))
except hvd.PeerLostError as error:
    print("named", current().failure.culprit)
""",
        4,
        str(victim),
    )
    assert ended.returncode == 128 + signal.SIGKILL, ended
    for rank in {0, 1, 2, 3} - {victim}:
        assert f"[{rank}] named {victim}" in ended.stdout, ended


def test_a_forked_child_holds_no_socket_of_the_rank() -> None:
    """A child that outlives its rank would otherwise keep the listener, and so hide the end of the rank."""
    ended = run(
        """
hvd.allgather(np.array([rank]))
of_rank = {name for _, name in sockets()}
sys.stdout.flush()
if not (child := os.fork()):
    kept = [socket.socket(fileno=os.dup(number)) for number, name in sockets() if name in of_rank]
    listening = [one for one in kept if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
    print(f"child of {rank} listens: {listening}", flush=True)
    os._exit(0)
os.waitpid(child, 0)
assert hvd.allreduce(1.0, op=hvd.Sum) == size
""",
        3,
    )
    assert ended.returncode == 0, ended
    for rank in range(3):
        assert f"child of {rank} listens: []" in ended.stdout, ended
