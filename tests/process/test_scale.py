"""Many ranks on one host: they start, compute, all name the one that is killed, and end."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, free_address, hvdrun

RANKS, VICTIM = 64, 37

# The victim ends only when all ranks have completed what came before: a rank that is lost earlier fails that.
HEAD = """
import os, signal, sys, time
import sirtaki.numpy as hvd
from sirtaki.bindings.default_context import current

def die_after_all(folder, victim):
    open(os.path.join(folder, str(hvd.rank())), "w").close()
    if hvd.rank() == victim:
        while len(os.listdir(folder)) < hvd.size():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""

SCRIPT = """

def count_sockets():
    opened = set()
    for one in os.listdir("/proc/self/fd"):
        try:
            opened.add(os.readlink(f"/proc/self/fd/{one}"))
        except FileNotFoundError:  # the one that lists them
            continue
    return sum(one.startswith("socket:") for one in opened)

rank, size, victim, folder, address, key = *map(int, sys.argv[1:4]), *sys.argv[4:]
before = count_sockets()
hvd.init(rank=rank, size=size, address=address, key=key)
sockets = count_sockets() - before
# However many ranks there are: to the rendezvous, to the lowest rank, and a pair that watches the stack.
assert rank == 0 or sockets <= 4, sockets
assert hvd.allreduce(float(rank), op=hvd.Sum) == size * (size - 1) / 2
die_after_all(folder, victim)
try:
    hvd.allreduce(1.0, name="loss")
except hvd.PeerLostError as error:
    assert f"rank {victim} " in str(error), error
    print("lost", current().failure.culprit)
hvd.shutdown()
"""


@pytest.mark.full
def test_many_ranks_start_and_all_name_the_one_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(HEAD + SCRIPT)
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    common = [str(RANKS), str(VICTIM), str(arrived), free_address(), secrets.token_hex(32)]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *common],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SIRTAKI_START_TIMEOUT": str(PATIENCE)},
        )
        for rank in range(RANKS)
    ]
    try:
        ended = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (out, err)) in enumerate(zip(ranks, ended, strict=True)):
        if number == VICTIM:
            assert rank.returncode == -signal.SIGKILL, err
        else:
            assert (rank.returncode, out) == (0, f"lost {VICTIM}\n"), err


# Ranks without descriptors of processes, which a system may refuse: only the lowest rank notices the end of
# another one by itself, and its abort names the lost rank to all others.
UNWATCHED = """
from sirtaki.runner.rendezvous import memory

memory.open_process = lambda: -1
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
hvd.barrier()
die_after_all(sys.argv[1], int(sys.argv[2]))
try:
    hvd.allreduce(1.0, name="loss")
except hvd.PeerLostError:
    print("lost", current().failure.culprit, flush=True)
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_named_without_descriptors_of_processes(tmp_path: Path, victim: int) -> None:
    command = hvdrun(3, sys.executable, "-c", HEAD + UNWATCHED, tmp_path, str(victim))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 128 + signal.SIGKILL, ended
    for rank in {0, 1, 2} - {victim}:
        assert f"[{rank}] lost {victim}" in ended.stdout, ended
