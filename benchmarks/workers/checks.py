"""A rank of benchmarks/checks.py: training steps, and the checks that they make.

Usage: python -m workers.checks SOCKET
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from typing import Any

import torch
from common.measure import timed
from common.models import MODELS
from common.serving import bind, serve

import sirtaki.torch as hvd

WARM_UP_STEPS = 5  # the first two are checked in full


class Rank:
    """The orders that a rank executes."""

    def prepare(self, model: str) -> None:
        torch.manual_seed(1 + hvd.rank())
        step = MODELS[model]()
        made = step.make_model()
        hvd.broadcast_parameters(made.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)
        gc.collect()
        self._optimizer: Any = hvd.DistributedOptimizer(optimizer, made.named_parameters())
        self._train = partial(step.train, made, self._optimizer)
        self.steps(WARM_UP_STEPS)

    def steps(self, count: int) -> list[float]:
        """Runs whole training steps; returns milliseconds."""
        return [one / 1e3 for one in timed(self._train, count)]

    def comparisons(self, count: int) -> list[float]:
        """Measures the checks' cost per step, with and without the wait, in microseconds."""
        checks = self._optimizer._reducer._checks

        def compare() -> None:
            checks.start()
            checks.finish()
            checks.report()

        return timed(compare, count)

    def once(self) -> float:
        """Measures one comparison of all parameters and of the optimizer's state, in milliseconds."""
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
    serve(path, hvd.rank(), rank)
    hvd.shutdown()


if __name__ == "__main__":
    main()
