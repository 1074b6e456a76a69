"""A job whose rank 1 is killed while the GPUs are at work. Rank 0 says what it is told of it."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor

import sirtaki.torch as hvd


def main() -> None:
    hvd.init()
    tensor = torch.ones(1 << 20)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        tensor = tensor.cuda()
    try:
        work(tensor)
    except hvd.PeerLostError as error:
        print(f"rank {hvd.rank()} has lost rank 1: {error}", flush=True)
        raise


def work(tensor: Tensor) -> None:
    for step in range(1000):
        if step == 50 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce_(tensor, op=hvd.Average, name="gradient")


main()
