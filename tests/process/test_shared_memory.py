"""Memory that ranks share, when one of them fails, forks or ends: nobody else writes into it any more."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from process_world import PATIENCE, run_script

import sirtaki.numpy as hvd

HEAD = """
import os, signal, sys, time
import numpy as np
import sirtaki.numpy as hvd

hvd.init()
"""

on_three_ranks = pytest.mark.ranks(3, seconds=PATIENCE)


def run(folder: Path, body: str, exit_code: int = 0, **settings: str) -> str:
    return run_script(folder, HEAD + textwrap.dedent(body), exit_code, **settings)


def test_nothing_is_written_after_a_failure(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
        arrays = [hvd.empty(4 << 20, np.float32) for _ in range(2)]
        hvd.allreduce_(arrays[0], name="warm-up")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hvdrun ends the others soon after the first failure
        if hvd.rank() == 1:
            import threading
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        try:
            while True:
                arrays[0][...] = hvd.rank()
                hvd.allreduce_(arrays[0], op=hvd.Sum, name="x")
        except hvd.PeerLostError as error:
            for array in arrays:
                array[...] = 7
            time.sleep(0.3)
            assert all((array == 7).all() for array in arrays)
            print(f"rank {hvd.rank()} heard: {error}")
        """,
        exit_code=128 + 9,
    )
    for rank in (0, 2):  # the message names 'x', unless the rank learns of the loss between two operations
        assert re.search(rf"rank {rank} heard: ('x': )?rank 1 \(pid", output)


def test_a_rank_that_stops_in_the_middle_is_named(tmp_path: Path) -> None:
    """Wherever a rank stops in an all-reduce, the others give up at the deadline, and not much later."""
    output = run(
        tmp_path,
        """
        array = hvd.empty(4 << 20, np.float32)
        hvd.allreduce_(array, name="warm-up")
        if hvd.rank() != 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif os.fork() == 0:
            time.sleep(0.2)
            os.kill(os.getppid(), signal.SIGSTOP)
            os._exit(0)
        try:
            while True:
                hvd.allreduce_(array, op=hvd.Sum, name="x")
        except hvd.HorovodInternalError as error:
            print(f"rank {hvd.rank()} heard: {error}", flush=True)
            sys.exit(1)
        """,
        exit_code=1,
        progress_deadline="8",
        stall_deadline="8",
    )
    for rank in (0, 2):
        heard = [line for line in output.splitlines() if f"rank {rank} heard:" in line]
        assert "rank 1 (pid" in heard[0]


@on_three_ranks
def test_a_forked_child_writes_into_memory_of_its_own() -> None:
    hvd.init()
    array, earlier = hvd.empty(1 << 20, np.float32), hvd.empty(1000)
    array[...], earlier[...] = 1, 1
    hvd.allreduce_(array, op=hvd.Sum)
    child = os.fork()
    if child == 0:
        array[...], earlier[...] = 9, 9
        alright = (array == 9).all() and (earlier == 9).all()
        try:
            hvd.empty(5)
        except hvd.HorovodInternalError:
            del array, earlier
            os._exit(0 if alright else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (array == 3).all()
    assert (earlier == 1).all()
    hvd.allreduce_(array, op=hvd.Sum)
    assert (array == 9).all()
    hvd.shutdown()
    child = os.fork()
    if child == 0:
        array[...] = 5
        os._exit(0)
    os.waitpid(child, 0)
    assert (array == 9).all()


@on_three_ranks
def test_arrays_outlive_their_world() -> None:
    old = np.zeros(1)
    for world in range(3):
        hvd.init()
        array = hvd.empty(1 << 20, np.float32)
        array[...] = world
        hvd.allreduce_(array, op=hvd.Sum)
        if world:
            hvd.allreduce_(old, op=hvd.Sum)  # of another world: an array like any other
            assert (old == 9 * (world - 1)).all()
        assert (array == 3 * world).all()
        old = array
        hvd.shutdown()
        old += 0  # it is still there


@on_three_ranks
def test_statistics_tell_whether_the_last_all_reduce_was_in_place() -> None:
    hvd.init()
    arrays = {"in place": hvd.empty(1 << 20, np.float32), "sliced": np.ones(1 << 20, np.float32)}
    for algorithm, array in arrays.items():
        hvd.allreduce_(array)
        (row,) = hvd.stats()["by_backend"]
        assert (row["algorithm"], row["backend"]) == (algorithm, "shared memory")
