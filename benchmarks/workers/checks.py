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


class Rank:
    """The orders that a rank obeys."""

    def prepare(self, model: str) -> None:
        torch.manual_seed(1 + hvd.rank())
        self._step: Step = MODELS[model]()
        self._model = self._step.make_model()
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        gc.collect()
        self._optimizer: Any = hvd.DistributedOptimizer(optimizer, self._model.named_parameters())
        self.rounds(WARM_UP_ROUNDS)

    def rounds(self, count: int) -> dict[str, list[float]]:
        """A step of each kind in every round, first the one, then the other. Times in milliseconds."""
        times: dict[str, list[float]] = {"checked": [], "plain": []}
        for turn in range(count):
            for name in sorted(times, reverse=turn % 2 == 0):
                # As with the setting check_parameters=0, which is that of a whole job.
                self._optimizer._reducer._checks._interval = -1 if name == "checked" else 0
                hvd.barrier()
                start = time.perf_counter()
                self._train()
                times[name].append((time.perf_counter() - start) * 1e3)
        return times

    def _train(self) -> None:
        self._optimizer.zero_grad()
        self._step.loss(self._model).backward()
        self._optimizer.step()

    def once(self) -> float:
        """One comparison of all parameters and of the optimizer's state, in milliseconds."""
        hvd.barrier()
        start = time.perf_counter()
        hvd.check_parameters(self._optimizer)
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
