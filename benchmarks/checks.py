"""What it costs to look for ranks that have come apart, on two ranks of one thread each.

    python benchmarks/checks.py [--rounds 40] [--json FILE]

A model takes training steps with the checks and without, in turn. What counts is the median of the
differences within a round, as a share of a step. Then one comparison of all parameters and of the optimizer's
state, which is made once, in the second step.
"""

from __future__ import annotations

from typing import Any

from common.jobs import Job, hvdrun
from common.measure import median, median_interval
from common.options import parser
from common.report import at_most, save, show_machine, show_table, show_targets
from train_step import MODELS

RANKS = 2
MOST_PERCENT = 0.5


def main() -> None:
    options = parser(__doc__, 40, "steps of each kind").parse_args()
    show_machine()
    with Job(hvdrun(RANKS), RANKS, "workers.checks") as job:
        rows = [measure(job, model, options.rounds) for model in MODELS]
    show(rows)
    targets = [
        at_most(
            f"checks in a step of {row['model']}", MOST_PERCENT, 100 * row["cost"].median / row["step"], "%"
        )
        for row in rows
    ]
    show_targets(targets)
    save(options.json, {"rows": [{**row, "cost": list(row["cost"])} for row in rows]}, targets)


def measure(job: Job, model: str, rounds: int) -> dict[str, Any]:
    """Times in milliseconds."""
    job.ask("prepare", model=model)
    ranks = job.ask("rounds", count=rounds)
    checked, plain = (
        [sum(times) / RANKS for times in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ("checked", "plain")
    )
    cost = median_interval([one - other for one, other in zip(checked, plain, strict=True)])
    return {"model": model, "step": median(plain), "cost": cost, "once": max(job.ask("once"))}


def show(rows: list[dict[str, Any]]) -> None:
    table = [
        [
            row["model"],
            f"{row['step']:.2f}",
            "{:+.1f} ({:+.1f} to {:+.1f})".format(*(1e3 * bound for bound in row["cost"])),
            f"{row['once']:.1f}",
        ]
        for row in rows
    ]
    show_table("Checks, 2 ranks", ["model", "step, ms", "checks in a step, µs", "one comparison, ms"], table)


if __name__ == "__main__":
    main()
