"""A job whose rank 1 is killed while the GPUs work. Both ranks print when, on the clock of their host."""

from __future__ import annotations

import os
import signal
import time

import torch
from card import own_card
from torch import Tensor

import sirtaki.torch as hvd


def main() -> None:
    hvd.init()
    # hvdrun ends the survivors once it knows the culprit, which may be before rank 0 has printed its error
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with own_card(hvd.local_rank()) as card:
        try:
            work(torch.ones(1 << 20, device=card.device))
        except hvd.PeerLostError as error:
            print(f"rank 0 has lost rank 1 at second {time.monotonic()}: {error}", flush=True)
            raise


def work(tensor: Tensor) -> None:
    """Works with a communicator of all ranks, beside an idle communicator of each rank."""
    own_sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    hvd.allreduce_(tensor, op=hvd.Sum, name="own", process_set=own_sets[hvd.rank()])
    for step in range(1000):
        if step == 50 and hvd.rank() == 1:
            print(f"rank 1 ends at second {time.monotonic()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce_(tensor, op=hvd.Average, name="gradient")


if __name__ == "__main__":
    main()
