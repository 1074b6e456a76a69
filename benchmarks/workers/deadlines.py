"""A rank of benchmarks/deadlines.py: training steps in which a random rank is slow.

Usage: python -m workers.deadlines SOCKET
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
from common.serving import serve
from torch import nn

import sirtaki.torch as hvd

FEATURES = 256
ROWS = 32  # a rank and step
NOISE = 0.1
RATE = 0.02


def examples(rows: int, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns points, and their noisy distances from the hyperplane that is learnt."""
    normal = torch.randn(FEATURES, 1, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(rows, FEATURES, generator=source)
    return inputs, inputs @ normal + NOISE * torch.randn(rows, 1, generator=source)


class Rank:
    """The orders that a rank executes."""

    def versions(self) -> dict[str, str]:
        """Returns the versions of what is measured."""
        return {"torch": torch.__version__}

    def train(self, steps: int, compute: float, delay: float, options: dict[str, Any]) -> dict[str, Any]:
        """Learns a hyperplane; returns the seconds that it took, the final loss, and the rounds missed.

        Each step takes `compute` seconds, and `delay` more on one rank: the same random one on all ranks.
        """
        source = torch.Generator().manual_seed(3 + hvd.rank())
        model = nn.Linear(FEATURES, 1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), **options)
        slow, missed = random.Random(1), 0
        hvd.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            time.sleep(compute + delay * (slow.randrange(hvd.size()) == hvd.rank()))
            inputs, targets = examples(ROWS, source)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            missed += bool(options) and optimizer.is_late
        if options:
            optimizer.flush()
        seconds = time.perf_counter() - began
        hvd.barrier()
        inputs, targets = examples(4096, torch.Generator().manual_seed(2))
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(inputs), targets).item()
        return {"seconds": seconds, "loss": loss, "missed": missed}


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    serve(sys.argv[1], hvd.rank(), Rank())
    hvd.shutdown()


if __name__ == "__main__":
    main()
