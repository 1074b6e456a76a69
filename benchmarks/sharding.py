"""Measures a training step with AdamW whose state, or state and gradients, are divided among the ranks.

    python benchmarks/sharding.py [-np 2] [--rounds 40] [--json FILE]

The ranks have one thread each. They take a step of each kind in turn; the copies of the model must have the
same bits in the end. The memory is that which the optimizer and the gradients take between two steps, on the
rank that has most.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import KEEP_MEMORY, Job, hvdrun
from common.measure import Interval, ratio
from common.options import RANKS, rounds
from common.report import Target, at_most, show_rows

MODELS = [
    "6 × Linear(2048), batch 16",
    "TransformerEncoder 12 × 256, batch 4 × 64",
    "200 × Linear(64), batch 16",
]
ROUNDS_PER_ORDER = 5
MOST_TIME = 1.05  # times the step without shard=
MOST_STATE = 1.05  # times the whole state divided by the ranks


@dataclass
class Row:
    """The result of one way to divide."""

    model: str
    shard: str
    milliseconds: float  # median of a step, on the slower rank
    ratio: Interval  # to the step without shard=, of the same round
    state: float  # MB
    gradients: float


COLUMNS = [
    ("model", lambda row: row.model),
    ("shard", lambda row: row.shard),
    ("step ms", lambda row: f"{row.milliseconds:,.1f}"),
    ("of none's", lambda row: f"{row.ratio:.2f}"),
    ("state MB", lambda row: f"{row.state:,.1f}"),
    ("gradients MB", lambda row: f"{row.gradients:,.1f}"),
]


def measure(options: Namespace) -> Results:
    """Runs everything."""
    with Job(hvdrun(options.ranks), options.ranks, "workers.sharding", settings=KEEP_MEMORY) as job:
        versions = job.ask("versions")[0]
        rows = [row for model in MODELS for row in measure_model(job, model, options.rounds)]
    return {"versions": versions, "ranks": options.ranks, "rows": rows}


def measure_model(job: Job, model: str, count: int) -> list[Row]:
    facts: list[dict[str, Any]] = job.ask("prepare", model=model)
    times: dict[str, list[float]] = {}
    for _ in range(0, count, ROUNDS_PER_ORDER):
        ranks = job.ask("rounds", count=ROUNDS_PER_ORDER)
        for name in ranks[0]:
            slowest = [max(of_ranks) for of_ranks in zip(*(rank[name] for rank in ranks), strict=True)]
            times.setdefault(name, []).extend(slowest)
    if not all(job.ask("are_equal")):
        raise SystemExit(f"{model}: the parameters differ")
    kept = {
        name: [max(rank["kept"][name][part] for rank in facts) / 1e6 for part in ("state", "gradients")]
        for name in times
    }
    return [
        Row(model, name, sorted(own)[len(own) // 2], ratio(own, times["none"]), *kept[name])
        for name, own in times.items()
    ]


def show(results: Results) -> None:
    title = f"Training step with AdamW, {results['ranks']} ranks"
    show_rows(title, COLUMNS, results["rows"], text_columns=2, group=lambda row: row.model)


def judge(results: Results) -> list[Target]:
    """Returns the targets: the time of divided steps, and the largest model's memory.

    The last model, of many small tensors, has no state that would be worth dividing.
    """
    rows: list[Row] = results["rows"]
    targets = [
        at_most(f'step with "{row.shard}", {row.model}', MOST_TIME, row.ratio.median, "×")
        for row in rows
        if row.shard != "none" and row.model != MODELS[-1]
    ]
    whole, part = (row.state for row in rows[:2])
    return [*targets, at_most("state of a rank", MOST_STATE / results["ranks"], part / whole, "×")]


BENCHMARK = Benchmark(__doc__, [RANKS, rounds(40, "rounds")], measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
