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
from sirtaki.bindings.context import current

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
from sirtaki.bindings.bootstrap import memory

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


# Ranks that may be lost: each adds numbers that depend on its worker, so that a sum shows whose it has.
SURVIVING = """
import os, signal, sys, time
import numpy as np
import sirtaki.numpy as hvd

worker, ranks, victim, folder = int(os.environ["SIRTAKI_WORKER"]), *map(int, sys.argv[1:3]), sys.argv[3]

def numbers(worker):
    return np.arange(64) * (worker + 1) + worker * worker

def add_up(workers):
    total = hvd.allreduce(numbers(worker), op=hvd.Sum, name="numbers")
    assert total.tolist() == sum(numbers(one) for one in workers).tolist(), total

@hvd.elastic.run
def train(state):
    everyone = set(range(ranks))
    if hvd.size() == ranks:
        add_up(everyone)
        open(os.path.join(folder, str(worker)), "w").close()
        if worker == victim:
            while len(os.listdir(folder)) < ranks:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(1.0, name="incomplete")
        raise SystemExit("an all-reduce has ended without the victim")
    add_up(everyone - {victim})
    print("survived", worker, hvd.rank(), hvd.size(), flush=True)

hvd.init()
train(hvd.elastic.ObjectState())
"""


@pytest.mark.exhaustive
def test_256_ranks_go_on_without_the_one_that_is_killed(tmp_path: Path) -> None:
    """Has the usual limit of descriptors: hvdrun and the ranks raise it as far as they need."""
    script = tmp_path / "rank.py"
    script.write_text(SURVIVING)
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    ranks, victim = 256, 101
    options = ("--min-np", "200", "--oversubscribe")
    command = hvdrun(ranks, *options, sys.executable, script, str(ranks), str(victim), arrived)
    # Lets other tests, which run at the same time and have deadlines, go first.
    limited = ["nice", "-n", "5", "sh", "-c", 'ulimit -S -n 1024; exec "$@"', "sh", *command]
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert ended.returncode == 0, ended
    assert f"rank {victim} was lost: killed by signal 9 (SIGKILL)" in ended.stderr
    found = [line.split()[2:] for line in ended.stdout.splitlines() if " survived " in line]
    workers, places, sizes = zip(*[map(int, one) for one in found], strict=True)
    assert sorted(workers) == [worker for worker in range(ranks) if worker != victim]
    assert sorted(places) == list(range(ranks - 1))
    assert set(sizes) == {ranks - 1}
