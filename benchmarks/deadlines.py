"""Measures training in which a random rank is slow in each step, with and without a deadline.

    python benchmarks/deadlines.py [--ranks 4] [--steps 300] [--rounds 3] [--json FILE]

The recipe is that of eager-SGD (Li et al., arXiv 1908.04207): the ranks learn a hyperplane, and in each step
one of them, chosen at random, is delayed. The time of a step's compute is slept, so that two cores suffice;
delays are multiples of it. Steps with a deadline wait for half of the ranks (`deadline=0, quorum=0.5`), and
what is late is accumulated or dropped.
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from typing import Any

import torch
from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.options import number, rounds
from common.report import Columns, Row, Table, Target, at_least, at_most, make_table
from common.torch_ranks import TorchRank
from torch import nn

import sirtaki.torch as hvd

COMPUTE = 0.02  # seconds of a step
DELAYS = (0.5, 1.0, 2.0)  # of the delayed rank, times a step's compute
AT_ONCE: dict[str, Any] = {"deadline": 0.0, "quorum": 0.5}
WAYS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "accumulate": {**AT_ONCE, "late": "accumulate"},
    "drop": {**AT_ONCE, "late": "drop"},
}
PACE = (1.0, "accumulate")  # the row that has targets
LEAST_GAIN = 1.27  # times the synchronous steps per second, as in the paper
MOST_LOSS = 1.1  # times the synchronous final loss
FEATURES = 256
ROWS = 32  # a rank and step
NOISE = 0.1
RATE = 0.02


def examples(rows: int, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns points, and their noisy distances from the hyperplane that is learnt."""
    normal = torch.randn(FEATURES, 1, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(rows, FEATURES, generator=source)
    return inputs, inputs @ normal + NOISE * torch.randn(rows, 1, generator=source)


class DeadlineRank(TorchRank):
    """Training steps in which a random rank is slow."""

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


COLUMNS: Columns = {
    "delay / compute": "{delay:.1f}",
    "late gradients": "{way}",
    "steps/s": "{steps_per_second:.1f}",
    "times synchronous": "{gain:.2f}",
    "final loss": "{loss:.5f}",
    "late": "{missed:.0%}",
}


def measure(options: Namespace) -> Results:
    """Measures all ways to train in turns, for each delay."""
    settings = {"SIRTAKI_LATE_REPORT": "1000000"}  # no report of a rank that is late on purpose
    with Job(hvdrun(options.ranks), options.ranks, DeadlineRank, settings=settings) as job:
        versions = job.ask("versions")[0]
        rows = [row for delay in DELAYS for row in measure_delay(job, delay, options)]
    return {"ranks": options.ranks, "steps": options.steps, "versions": versions, "rows": rows}


def measure_delay(job: Job, delay: float, options: Namespace) -> list[Row]:
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way, arguments in WAYS.items():
            ranks = job.ask(
                "train", steps=options.steps, compute=COMPUTE, delay=delay * COMPUTE, options=arguments
            )
            pace = options.steps / max(rank["seconds"] for rank in ranks)
            missed = sum(rank["missed"] for rank in ranks) / (options.steps * options.ranks)
            found[way].append((pace, ranks[0]["loss"], missed))
    medians = {way: [median(list(one)) for one in zip(*runs, strict=True)] for way, runs in found.items()}
    synchronous = medians["synchronous"][0]
    return [
        {"delay": delay, "way": way, "steps_per_second": pace, "gain": pace / synchronous}
        | {"loss": loss, "missed": missed}
        for way, (pace, loss, missed) in medians.items()
    ]


def tables(results: Results) -> list[Table]:
    title = f"Steps in which one of {results['ranks']} ranks is delayed, {COMPUTE * 1e3:.0f} ms of compute"
    return [make_table(title, COLUMNS, results["rows"], group="delay", text_columns=2)]


def judge(results: Results) -> list[Target]:
    """Returns the targets for delays as long as a step, with gradients that are accumulated."""
    rows = {(row["delay"], row["way"]): row for row in results["rows"]}
    judged, synchronous = rows[PACE], rows[PACE[0], "synchronous"]
    ratio = judged["loss"] / synchronous["loss"]
    return [
        at_least("steps per second with a deadline, times those without", LEAST_GAIN, judged["gain"], "×"),
        at_most("final loss with a deadline, times that without", MOST_LOSS, ratio, "×"),
    ]


OPTIONS = [
    rounds(3, "blocks of each"),
    number("--ranks", 4, "how many ranks"),
    number("--steps", 300, "steps of a block"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
