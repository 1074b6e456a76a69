"""A rank of benchmarks/checks.py: training steps with and without the checks, in turns.

Usage: python -m workers.checks SOCKET
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
from common.jobs import bind, serve
from common.models import MODELS, Step

import sirtaki.torch as hvd

WARM_UP_ROUNDS = 5  # the first two rounds are checked in full


class Copy:
    """A copy of the model, and its optimizer."""

    def __init__(self, step: Step) -> None:
        torch.manual_seed(0)  # alike on all ranks
        self._step = step
        self.model = step.make_model()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer: Any = hvd.DistributedOptimizer(optimizer, self.model.named_parameters())

    def run(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        self._step.loss(self.model).backward()
        self.optimizer.step()


class Rank:
    """The orders that a rank obeys."""

    def __init__(self) -> None:
        self._copies: dict[str, Copy] = {}

    def prepare(self, model: str) -> None:
        torch.manual_seed(1 + hvd.rank())
        step = MODELS[model]()
        self._copies.clear()
        gc.collect()
        self._copies = {"checked": Copy(step), "plain": Copy(step)}
        # As with the setting check_parameters=0, which is that of a whole job.
        self._copies["plain"].optimizer._reducer._checks._interval = 0
        self.rounds(WARM_UP_ROUNDS)

    def rounds(self, count: int) -> dict[str, list[float]]:
        """One step of each in every round, each round beginning with another. Times in milliseconds."""
        times: dict[str, list[float]] = {name: [] for name in self._copies}
        for turn in range(count):
            for name in sorted(times, reverse=turn % 2 == 0):
                hvd.barrier()
                start = time.perf_counter()
                self._copies[name].run()
                times[name].append((time.perf_counter() - start) * 1e3)
        return times

    def once(self) -> float:
        """One comparison of all parameters and of the optimizer's state, in milliseconds."""
        hvd.barrier()
        start = time.perf_counter()
        hvd.check_parameters(self._copies["checked"].optimizer)
        return (time.perf_counter() - start) * 1e3


def main() -> None:
    (path,) = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init()
    rank = Rank()
    bind(hvd.rank(), hvd.size())
    gc.disable()
    serve(path, hvd.rank(), {"prepare": rank.prepare, "rounds": rank.rounds, "once": rank.once})
    hvd.shutdown()


if __name__ == "__main__":
    main()
