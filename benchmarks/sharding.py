"""Measures a training step with AdamW whose state, or state and gradients, are divided among the ranks.

    python benchmarks/sharding.py [-np 2] [--rounds 40] [--json FILE]

The ranks have one thread each. They take a step of each kind in turn; the copies of the model must have the
same bits in the end. The memory is that which the optimizer and the gradients take between two steps, on the
rank that has most.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.harness import Benchmark, Results
from common.jobs import KEEP_MEMORY, Job, hvdrun
from common.measure import median, ratio
from common.models import MODELS
from common.options import RANKS, rounds
from common.report import Columns, Row, Table, Target, at_most, make_table
from common.torch_ranks import TorchRank, alternate_steps
from torch import Tensor, nn

import sirtaki.torch as hvd

SHARDS = {"none": None, "state": "state", "gradients": "gradients"}
WARM_UP_ROUNDS = 3
MOST_TIME = 1.05  # times the step without shard=
MOST_STATE = 1.05  # times the whole state divided by the ranks


class ShardingRank(TorchRank):
    """Training steps with the optimizer's data whole, and divided."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._copies: dict[str, tuple[nn.Module, Any]] = {}

    def prepare(self, model: str) -> dict[str, dict[str, int]]:
        """Makes a copy of the model for each way; returns the bytes that this rank keeps."""
        self._copies.clear()
        gc.collect()
        self._step = MODELS[model]()
        for name, shard in SHARDS.items():
            torch.manual_seed(0)
            made = self._step.make_model()
            optimizer = torch.optim.AdamW(made.parameters(), lr=1e-5)
            self._copies[name] = made, hvd.DistributedOptimizer(optimizer, shard=shard)
        self.rounds(WARM_UP_ROUNDS)
        return {name: _kept(*copy) for name, copy in self._copies.items()}

    def rounds(self, count: int) -> dict[str, list[float]]:
        """Runs one step of each kind per round. Times in milliseconds."""
        steps = {name: partial(self._step.train, *copy) for name, copy in self._copies.items()}
        return alternate_steps(steps, count)

    def are_equal(self) -> bool:
        """Returns whether all copies have the same bits."""
        first, *others = [list(model.parameters()) for model, _ in self._copies.values()]
        return all(torch.equal(one, two) for other in others for one, two in zip(first, other, strict=True))


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _kept(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Returns the bytes of state and of gradients between two steps."""
    state = [one for values in optimizer.state.values() for one in values.values()]
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    own = [getattr(one, "own", one) for one in gradients]
    return {"state": sum(map(_bytes, state)), "gradients": sum(map(_bytes, own))}


COLUMNS: Columns = {
    "model": "{model}",
    "shard": "{shard}",
    "step ms": "{milliseconds:,.1f}",
    "of none's": "{ratio:.2f}",
    "state MB": "{state:,.1f}",
    "gradients MB": "{gradients:,.1f}",
}


def measure(options: Namespace) -> Results:
    """Runs everything."""
    with Job(hvdrun(options.ranks), options.ranks, ShardingRank, settings=KEEP_MEMORY) as job:
        versions = job.ask("versions")[0]
        rows = [row for model in MODELS for row in measure_model(job, model, options.rounds)]
    return {"versions": versions, "ranks": options.ranks, "rows": rows}


def measure_model(job: Job, model: str, rounds: int) -> list[Row]:
    """Returns the step of each way on the slower rank, its ratio to that without shard=, and the memory."""
    kept = job.ask("prepare", model=model)
    times = job.rounds(rounds)
    if not all(job.ask("are_equal")):
        raise SystemExit(f"{model}: the parameters differ")
    rows = []
    for name, own in times.items():
        row = {"model": model, "shard": name, "milliseconds": median(own), "ratio": ratio(own, times["none"])}
        for part in ("state", "gradients"):
            row[part] = max(rank[name][part] for rank in kept) / 1e6
        rows.append(row)
    return rows


def tables(results: Results) -> list[Table]:
    title = f"Training step with AdamW, {results['ranks']} ranks"
    return [make_table(title, COLUMNS, results["rows"], group="model", text_columns=2)]


def judge(results: Results) -> list[Target]:
    """Returns the targets: the time of divided steps, and the largest model's memory.

    The last model, of many small tensors, has no state that would be worth dividing.
    """
    rows = results["rows"]
    targets = [
        at_most(f'step with "{row["shard"]}", {row["model"]}', MOST_TIME, row["ratio"].median, "×")
        for row in rows
        if row["shard"] != "none" and row["model"] != list(MODELS)[-1]
    ]
    whole, part = (row["state"] for row in rows[:2])
    return [*targets, at_most("state of a rank", MOST_STATE / results["ranks"], part / whole, "×")]


BENCHMARK = Benchmark(__doc__, [RANKS, rounds(40, "rounds")], measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
