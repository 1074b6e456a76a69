"""Measures the cost of detecting ranks that have diverged, on two ranks of one thread each.

    python benchmarks/checks.py [--rounds 40] [--json FILE]

The cost per step is timed in isolation: a comparison without news, including the wait for the other rank,
which a real step spends waiting for gradients anyway. The result is therefore an upper bound of the checks'
cost. The second measurement is one comparison of all parameters and of the optimizer's state, which happens
once, in the second step.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from functools import partial
from typing import Any

import torch
from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median, timed
from common.models import MODELS
from common.options import rounds
from common.report import Columns, Row, Table, Target, at_most, make_table
from common.serving import bind
from common.torch_ranks import TorchRank

import sirtaki.torch as hvd

RANKS = 2
MOST_PERCENT = 0.5
COMPARISONS = 300
WARM_UP_STEPS = 5  # the first two are checked in full


class CheckedRank(TorchRank):
    """Training steps, and the checks that they make."""

    def prepare(self, model: str) -> None:
        torch.manual_seed(1 + self.number)
        step = MODELS[model]()
        made = step.make_model()
        hvd.broadcast_parameters(made.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)
        gc.collect()
        self._optimizer: Any = hvd.DistributedOptimizer(optimizer, made.named_parameters())
        self._train = partial(step.train, made, self._optimizer)
        bind(self.number, self.size)
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


COLUMNS: Columns = {
    "model": "{model}",
    "step, ms": "{step:.2f}",
    "checks in a step, µs": "{checks:.1f}",
    "one comparison, ms": "{once:.1f}",
}


def measure(options: Namespace) -> Results:
    with Job(hvdrun(RANKS), RANKS, CheckedRank) as job:
        return {"rows": [measure_model(job, model, options.rounds) for model in MODELS]}


def measure_model(job: Job, model: str, rounds: int) -> Row:
    """Returns the times of a step in ms, of its checks in µs, and of one full comparison in ms."""
    job.ask("prepare", model=model)
    step = median(job.ask("steps", count=rounds)[0])
    checks = median(job.ask("comparisons", count=COMPARISONS)[0])
    return {"model": model, "step": step, "checks": checks, "once": max(job.ask("once"))}


def tables(results: Results) -> list[Table]:
    return [make_table("Checks, 2 ranks", COLUMNS, results["rows"])]


def judge(results: Results) -> list[Target]:
    return [
        at_most(f"checks in a step of {row['model']}", MOST_PERCENT, row["checks"] / row["step"] / 10, "%")
        for row in results["rows"]
    ]


BENCHMARK = Benchmark(__doc__, [rounds(20, "steps of each model")], measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
