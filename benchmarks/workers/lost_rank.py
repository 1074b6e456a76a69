"""A rank of the measurement with a dead rank: the last rank is killed while its DataLoader's workers live.

    python -m workers.lost_rank RANK SIZE ADDRESS FILE

It is started without a launcher, which would end the other ranks itself. The key comes from SIRTAKI_KEY_FILE.
It writes JSON into FILE, {"killed": t} or {"raised": t, "text": …}, in seconds of the clock that all ranks
share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import sirtaki.torch as hvd

STEPS_BEFORE = 20
DATA_WORKERS = 2


def main() -> None:
    rank, size, address, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    hvd.init(rank=rank, size=size, address=address)
    batches = iter(DataLoader(TensorDataset(torch.zeros(10_000, 8)), 4, num_workers=DATA_WORKERS))
    next(batches)  # the workers are alive, and have inherited the rank's descriptors
    gradient = torch.zeros(1 << 20)
    try:
        for step in range(1_000_000):
            hvd.allreduce_(gradient, name="gradient")
            if step == STEPS_BEFORE and rank == size - 1:
                result.write_text(json.dumps({"killed": time.monotonic()}))
                os.kill(os.getpid(), signal.SIGKILL)
    except hvd.HorovodInternalError as error:
        result.write_text(json.dumps({"raised": time.monotonic(), "text": str(error)}))
    os._exit(0)


if __name__ == "__main__":
    main()
