"""How soon a rank that waits for a killed one raises, without a launcher, which would wake it by a signal."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from process_world import PATIENCE, free_address

SCRIPT = """
import sys, time
import numpy as np
import sirtaki.numpy as hvd

rank, victim, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
hvd.init(rank=rank, size=2, address=address)
hvd.barrier()
print("here", flush=True)
if rank == victim:
    time.sleep(60)
try:
    hvd.allreduce(np.ones(10), name="loss")
except hvd.PeerLostError:
    print(time.monotonic())
"""


def delay_after_the_end_of(victim: int) -> float:
    """Returns the seconds from the end of the victim's process until the other rank raises."""
    address = free_address()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(victim), address], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "here\n"
    time.sleep(0.2)  # the other one is asleep
    ranks[victim].kill()
    ranks[victim].wait()
    ended = time.monotonic()
    out, _ = ranks[1 - victim].communicate(timeout=PATIENCE)
    ranks[victim].communicate()
    return float(out) - ended


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_is_noticed_when_its_process_ends(victim: int) -> None:
    """And not only when the waiting rank wakes to check its deadlines, up to 1 s later."""
    delays = [delay_after_the_end_of(victim)]
    while min(delays) > 0.05 and len(delays) < 6:  # another process may hold up a single one
        delays.append(delay_after_the_end_of(victim))
    assert min(delays) < 0.05, delays
