"""Measures stale gradients and a parameter server with a slow rank, beside synchronous training.

    python benchmarks/staleness.py [-np 8] [--servers K] [--updates 400] [--rounds 3] [--json FILE]

The ranks learn to read handwritten digits. Their steps sleep, as if they computed on devices of their own, so
many ranks share a few cores. Slow is no rank, the last one in all of its steps, or a different rank in each
step. Speed is the number of steps of all ranks together in a second.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.options import Option, number, rounds
from common.report import Columns, Row, Table, Target, at_least, make_table
from common.torch_ranks import TorchRank
from torch import Tensor, nn

import sirtaki.torch as hvd

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from digits_data import load

SLOW = {"none": "none", "one": "the last rank", "each": "a different one in each step"}
TRAININGS = [*(("optimizer", staleness) for staleness in (0, 1, 2, 3)), ("table", 3)]
LEAST_SHARE = 0.9  # of the speed without a slow rank, with a slow one and staleness=3
MOST_LOST = 0.01  # of the accuracy of synchronous training
ROWS = 16  # of a rank's batch
LEARNING_RATE = 0.2  # at the beginning


@dataclass
class Training:
    """A training of a rank. Slow is no rank ("none"), the last one ("one"), or another each step ("each")."""

    staleness: int
    slow: str
    updates: int
    seconds: float
    seed: int

    def __post_init__(self) -> None:
        self.images, self.test_images, self.labels, self.test_labels = map(torch.from_numpy, load())
        self.source = torch.Generator().manual_seed(1000 * self.seed + hvd.rank())
        torch.manual_seed(self.seed)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.steps = 0

    def compute(self) -> None:
        """Computes gradients, and sleeps: `seconds`, or twice as long on a slow rank."""
        rows = torch.randint(len(self.labels), (ROWS,), generator=self.source)
        self.model.zero_grad()
        nn.functional.cross_entropy(self.model(self.images[rows]), self.labels[rows]).backward()
        time.sleep(self.seconds * (2 if self._is_slow() else 1))
        self.steps += 1

    def _is_slow(self) -> bool:
        if self.slow == "one":
            return hvd.rank() == hvd.size() - 1
        return self.slow == "each" and self.steps % hvd.size() == hvd.rank()

    def with_optimizer(self) -> float:
        """Trains with a distributed optimizer; returns the duration."""
        staleness, named = self.staleness, self.model.named_parameters()
        optimizer = decaying(
            hvd.DistributedOptimizer(sgd(self.model.parameters()), named, staleness=staleness), self.updates
        )
        hvd.barrier()
        start = time.perf_counter()
        while (optimizer.clock() if staleness else self.steps) < self.updates:
            self.compute()
            optimizer.step()
        optimizer.synchronize()
        return time.perf_counter() - start

    def with_table(self) -> float:
        """Trains with a parameter server; returns the duration."""
        updates = self.updates  # servers get the function, with all that it refers to
        table = hvd.ParameterServer(
            self.model.named_parameters(), lambda params: decaying(sgd(params), updates), self.staleness
        )
        hvd.barrier()
        start = time.perf_counter()
        while self.steps < self.updates:
            table.pull()
            self.compute()
            table.push()
        table.finish()
        return time.perf_counter() - start

    @torch.no_grad()
    def accuracy(self) -> float:
        return (self.model(self.test_images).argmax(1) == self.test_labels).float().mean().item()


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.5)


def decaying(optimizer: Any, updates: int) -> Any:
    """Returns the optimizer, whose learning rate falls to a tenth with the updates."""
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, updates)
    optimizer.register_step_post_hook(lambda *_: decay.step())
    return optimizer


class StaleRank(TorchRank):
    """A training on handwritten digits whose steps also sleep."""

    def train(self, method: str, **how: Any) -> dict[str, Any]:
        """Trains; returns the duration, this rank's steps, and the accuracy."""
        training = Training(**how)
        seconds = training.with_table() if method == "table" else training.with_optimizer()
        hvd.check_parameters(training.model.state_dict())
        return {"seconds": seconds, "steps": training.steps, "accuracy": training.accuracy()}


def name_of(row: Row) -> str:
    name = "parameter server, " if row["method"] == "table" else ""
    return f"{name}staleness={row['staleness']}" if row["staleness"] else "synchronous"


COLUMNS: Columns = {
    "slow": lambda row: SLOW[row["slow"]],
    "training": name_of,
    "steps/s": "{speed:,.0f}",
    "of none slow": "{share:.2f}",
    "updates/s": "{updates:.1f}",
    "accuracy": "{accuracy:.1%}",
}


def measure(options: Namespace) -> Results:
    """Trains in all ways, in turns."""
    ways = [(slow, *training) for slow in SLOW for training in TRAININGS]
    found: dict[tuple[str, str, int], list[list[float]]] = {way: [] for way in ways}
    servers = ["--servers", str(options.servers)] if options.servers else []
    with Job([*hvdrun(options.ranks), *servers], options.ranks, StaleRank) as job:
        versions = job.ask("versions")[0]
        for seed in range(options.rounds):
            for slow, method, staleness in ways:
                how = {"updates": options.updates, "seconds": options.milliseconds / 1e3, "seed": seed}
                ranks = job.ask("train", method=method, staleness=staleness, slow=slow, **how)
                seconds = max(rank["seconds"] for rank in ranks)
                steps = sum(rank["steps"] for rank in ranks)
                result = [steps / seconds, options.updates / seconds, ranks[0]["accuracy"]]
                found[slow, method, staleness].append(result)
    medians = {way: [median(one) for one in zip(*results, strict=True)] for way, results in found.items()}
    full = medians["none", "optimizer", 0][0]
    rows = [
        {"slow": slow, "method": method, "staleness": staleness, "speed": speed, "share": speed / full}
        | {"updates": updates, "accuracy": accuracy}
        for (slow, method, staleness), (speed, updates, accuracy) in medians.items()
    ]
    how = {name: getattr(options, name) for name in ("ranks", "servers", "milliseconds")}
    return {**how, "versions": versions, "rows": rows}


def tables(results: Results) -> list[Table]:
    title = f"Training with stale gradients, {results['ranks']} ranks, steps of {results['milliseconds']} ms"
    return [make_table(title, COLUMNS, results["rows"], group="slow", text_columns=2)]


def judge(results: Results) -> list[Target]:
    """Returns the targets with a rank that is always slow."""
    rows = {(row["slow"], row["staleness"]): row for row in results["rows"] if row["method"] == "optimizer"}
    stale, synchronous = rows["one", 3], rows["none", 0]
    kept = 1 - (synchronous["accuracy"] - stale["accuracy"])
    return [
        at_least("speed with a slow rank and staleness=3, of none slow", LEAST_SHARE, stale["share"]),
        at_least("accuracy then, 1 being that of synchronous training", 1 - MOST_LOST, kept, ""),
    ]


OPTIONS = [
    Option("-np", dest="ranks", type=int, default=8, help="how many ranks (8)"),
    number("--servers", 0, "processes beside the ranks that serve the table; 0: the ranks do"),
    number("--updates", 400, "updates of a training"),
    number("--milliseconds", 30, "duration of a step"),
    rounds(3, "trainings of each kind"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
