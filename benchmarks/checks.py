"""Measures the cost of detecting ranks that have diverged, on two ranks of one thread each.

    python benchmarks/checks.py [--rounds 40] [--json FILE]

The cost per step is timed in isolation: a comparison without news, including the wait for the other rank,
which a real step spends waiting for gradients anyway. The result is therefore an upper bound of the checks'
cost. The second measurement is one comparison of all parameters and of the optimizer's state, which happens
once, in the second step.
"""

from __future__ import annotations

from typing import Any

from common.jobs import Job, hvdrun
from common.measure import median
from common.options import parser
from common.report import at_most, save, show_machine, show_table, show_targets
from train_step import MODELS

RANKS = 2
MOST_PERCENT = 0.5
COMPARISONS = 300


def main() -> None:
    options = parser(__doc__, 20, "steps of each model").parse_args()
    show_machine()
    with Job(hvdrun(RANKS), RANKS, "workers.checks") as job:
        rows = [measure(job, model, options.rounds) for model in MODELS]
    show(rows)
    targets = [
        at_most(f"checks in a step of {row['model']}", MOST_PERCENT, row["checks"] / row["step"] / 10, "%")
        for row in rows
    ]
    show_targets(targets)
    save(options.json, {"rows": rows}, targets)


def measure(job: Job, model: str, rounds: int) -> dict[str, Any]:
    """Returns the times of a step in ms, of its checks in µs, and of one full comparison in ms."""
    job.ask("prepare", model=model)
    step = median(job.ask("steps", count=rounds)[0])
    checks = median(job.ask("comparisons", count=COMPARISONS)[0])
    return {"model": model, "step": step, "checks": checks, "once": max(job.ask("once"))}


def show(rows: list[dict[str, Any]]) -> None:
    table = [
        [row["model"], f"{row['step']:.2f}", f"{row['checks']:.1f}", f"{row['once']:.1f}"] for row in rows
    ]
    show_table("Checks, 2 ranks", ["model", "step, ms", "checks in a step, µs", "one comparison, ms"], table)


if __name__ == "__main__":
    main()
