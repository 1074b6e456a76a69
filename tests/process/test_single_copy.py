"""Ranks that read each other's memory: their own processes, and what happens when one of them ends."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from process_world import PATIENCE, may_read_siblings, run_script

import sirtaki.numpy as hvd

HEAD = """
import os, signal, sys, time
import numpy as np
import sirtaki.numpy as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
"""


def run(folder: Path, body: str, exit_code: int = 0, **settings: str) -> str:
    return run_script(folder, HEAD + textwrap.dedent(body), exit_code, **settings)


@pytest.fixture(params=["1", "0"])
def single_copy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("SIRTAKI_SINGLE_COPY", request.param)
    return request.param == "1" and may_read_siblings()


@pytest.mark.ranks(3, seconds=PATIENCE)
def test_what_moves_arrives(single_copy: bool) -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    rows = np.arange(rank * 90_000, (rank + 1) * 90_000).reshape(-1, 3)
    for again in range(3):
        gathered = hvd.allgather(rows)
        assert (gathered.ravel() == np.arange(size * 90_000)).all()
        array = hvd.broadcast(rows[:9_000], root_rank=again)
        assert (array.ravel() == np.arange(again * 90_000, again * 90_000 + 27_000)).all()
        parts = hvd.alltoall(rows)
        begins = [sender * 90_000 + rank * 30_000 for sender in range(size)]
        assert (parts.ravel() == np.concatenate([np.arange(b, b + 30_000) for b in begins])).all()
    rows_of_memory = [row for row in hvd.stats()["by_backend"] if row["backend"] == "shared memory"]
    assert {row["algorithm"] for row in rows_of_memory} == {"single copy" if single_copy else ""}


def test_a_lost_root_gives_nothing_wrong(tmp_path: Path) -> None:
    output = run(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # hvdrun ends the others soon after the first failure
        if rank == 1:
            import threading
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        array = np.zeros(1 << 17, np.int64)
        try:
            for step in range(1_000_000):
                if rank == 1:
                    array[...] = step
                hvd.broadcast_(array, root_rank=1, name="x")
                assert (array == step).all()
        except hvd.PeerLostError as error:
            print(f"rank {rank} heard: {error}")
        """,
        exit_code=128 + 9,
    )
    for rank in (0, 2):  # a rank may hear of it between two broadcasts, when no tensor is in flight
        assert re.search(rf"rank {rank} heard: ('x': )?rank 1 \(pid \d+ on \S+\) was lost", output)
