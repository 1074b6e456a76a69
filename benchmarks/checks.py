"""Measures the cost of detecting ranks that have diverged, on two ranks of one thread each.

    python benchmarks/checks.py [--rounds 40] [--json FILE]

The cost per step is timed in isolation: a comparison without news, including the wait for the other rank,
which a real step spends waiting for gradients anyway. The result is therefore an upper bound of the checks'
cost. The second measurement is one comparison of all parameters and of the optimizer's state, which happens
once, in the second step.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.options import rounds
from common.report import Target, at_most, show_rows
from train_step import MODELS

RANKS = 2
MOST_PERCENT = 0.5
COMPARISONS = 300

COLUMNS = [
    ("model", lambda row: row["model"]),
    ("step, ms", lambda row: f"{row['step']:.2f}"),
    ("checks in a step, µs", lambda row: f"{row['checks']:.1f}"),
    ("one comparison, ms", lambda row: f"{row['once']:.1f}"),
]


def measure(options: Namespace) -> Results:
    with Job(hvdrun(RANKS), RANKS, "workers.checks") as job:
        return {"rows": [measure_model(job, model, options.rounds) for model in MODELS]}


def measure_model(job: Job, model: str, rounds: int) -> dict[str, Any]:
    """Returns the times of a step in ms, of its checks in µs, and of one full comparison in ms."""
    job.ask("prepare", model=model)
    step = median(job.ask("steps", count=rounds)[0])
    checks = median(job.ask("comparisons", count=COMPARISONS)[0])
    return {"model": model, "step": step, "checks": checks, "once": max(job.ask("once"))}


def show(results: Results) -> None:
    show_rows("Checks, 2 ranks", COLUMNS, results["rows"])


def judge(results: Results) -> list[Target]:
    return [
        at_most(f"checks in a step of {row['model']}", MOST_PERCENT, row["checks"] / row["step"] / 10, "%")
        for row in results["rows"]
    ]


BENCHMARK = Benchmark(__doc__, [rounds(20, "steps of each model")], measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
