"""Measures stale gradients and a parameter server with a slow rank, beside synchronous training.

    python benchmarks/staleness.py [-np 8] [--servers K] [--updates 400] [--rounds 3] [--json FILE]

The ranks learn to read handwritten digits. Their steps sleep, as if they computed on devices of their own, so
many ranks share a few cores. Slow is no rank, the last one in all of its steps, or a different rank in each
step. Speed is the number of steps of all ranks together in a second.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.options import Option, number, rounds
from common.report import Target, at_least, show_rows

WORKER = "workers.staleness"
SLOW = {"none": "none", "one": "the last rank", "each": "a different one in each step"}
TRAININGS = [*(("optimizer", staleness) for staleness in (0, 1, 2, 3)), ("table", 3)]
LEAST_SHARE = 0.9  # of the speed without a slow rank, with a slow one and staleness=3
MOST_LOST = 0.01  # of the accuracy of synchronous training


@dataclass
class Row:
    """The result of one training."""

    slow: str
    method: str
    staleness: int
    speed: float  # steps of all ranks in a second
    share: float  # of the speed of synchronous training without a slow rank
    updates: float  # in a second
    accuracy: float


def name_of(row: Row) -> str:
    name = "parameter server, " if row.method == "table" else ""
    return f"{name}staleness={row.staleness}" if row.staleness else "synchronous"


COLUMNS = [
    ("slow", lambda row: SLOW[row.slow]),
    ("training", name_of),
    ("steps/s", lambda row: f"{row.speed:,.0f}"),
    ("of none slow", lambda row: f"{row.share:.2f}"),
    ("updates/s", lambda row: f"{row.updates:.1f}"),
    ("accuracy", lambda row: f"{row.accuracy:.1%}"),
]


def measure(options: Namespace) -> Results:
    """Trains in all ways, in turns."""
    ways = [(slow, *training) for slow in SLOW for training in TRAININGS]
    found: dict[tuple[str, str, int], list[list[float]]] = {way: [] for way in ways}
    servers = ["--servers", str(options.servers)] if options.servers else []
    with Job([*hvdrun(options.ranks), *servers], options.ranks, WORKER) as job:
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
        Row(*way, speed=speed, share=speed / full, updates=updates, accuracy=accuracy)
        for way, (speed, updates, accuracy) in medians.items()
    ]
    how = {name: getattr(options, name) for name in ("ranks", "servers", "milliseconds")}
    return {**how, "versions": versions, "rows": rows}


def show(results: Results) -> None:
    title = f"Training with stale gradients, {results['ranks']} ranks, steps of {results['milliseconds']} ms"
    show_rows(title, COLUMNS, results["rows"], text_columns=2, group=lambda row: row.slow)


def judge(results: Results) -> list[Target]:
    """Returns the targets with a rank that is always slow."""
    rows = {(row.slow, row.staleness): row for row in results["rows"] if row.method == "optimizer"}
    stale, synchronous = rows["one", 3], rows["none", 0]
    kept = 1 - (synchronous.accuracy - stale.accuracy)
    return [
        at_least("speed with a slow rank and staleness=3, of none slow", LEAST_SHARE, stale.share),
        at_least("accuracy then, 1 being that of synchronous training", 1 - MOST_LOST, kept, ""),
    ]


OPTIONS = [
    Option("-np", dest="ranks", type=int, default=8, help="how many ranks (8)"),
    number("--servers", 0, "processes beside the ranks that serve the table; 0: the ranks do"),
    number("--updates", 400, "updates of a training"),
    number("--milliseconds", 30, "duration of a step"),
    rounds(3, "trainings of each kind"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
