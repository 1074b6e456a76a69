"""Measures training in which a random rank is slow in each step, with and without a deadline.

    python benchmarks/deadlines.py [--ranks 4] [--steps 300] [--rounds 3] [--json FILE]

The recipe is that of eager-SGD (Li et al., arXiv 1908.04207): the ranks learn a hyperplane, and in each step
one of them, chosen at random, is delayed. The time of a step's compute is slept, so that two cores suffice;
delays are multiples of it. Steps with a deadline wait for half of the ranks (`deadline=0, quorum=0.5`), and
what is late is accumulated or dropped.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.options import number, rounds
from common.report import Target, at_least, at_most, show_rows

WORKER = "workers.deadlines"
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


@dataclass
class Row:
    """The result of one way to train."""

    delay: float  # times a step's compute
    way: str
    steps_per_second: float
    gain: float  # over synchronous steps
    loss: float
    missed: float  # share of the contributions that were late

    @property
    def is_judged(self) -> bool:
        return (self.delay, self.way) == PACE


COLUMNS = [
    ("delay / compute", lambda row: f"{row.delay:.1f}"),
    ("late gradients", lambda row: row.way),
    ("steps/s", lambda row: f"{row.steps_per_second:.1f}"),
    ("times synchronous", lambda row: f"{row.gain:.2f}"),
    ("final loss", lambda row: f"{row.loss:.5f}"),
    ("late", lambda row: f"{row.missed:.0%}"),
]


def measure(options: Namespace) -> Results:
    """Measures all ways to train in turns, for each delay."""
    settings = {"SIRTAKI_LATE_REPORT": "1000000"}  # no report of a rank that is late on purpose
    with Job(hvdrun(options.ranks), options.ranks, WORKER, settings=settings) as job:
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
    return [Row(delay, way, pace, pace / synchronous, *rest) for way, (pace, *rest) in medians.items()]


def show(results: Results) -> None:
    title = f"Steps in which one of {results['ranks']} ranks is delayed, {COMPUTE * 1e3:.0f} ms of compute"
    show_rows(title, COLUMNS, results["rows"], text_columns=2, group=lambda row: row.delay)


def judge(results: Results) -> list[Target]:
    """Returns the targets for delays as long as a step, with gradients that are accumulated."""
    judged = next(row for row in results["rows"] if row.is_judged)
    synchronous = next(
        row for row in results["rows"] if row.way == "synchronous" and row.delay == judged.delay
    )
    ratio = judged.loss / synchronous.loss
    return [
        at_least("steps per second with a deadline, times those without", LEAST_GAIN, judged.gain, "×"),
        at_most("final loss with a deadline, times that without", MOST_LOSS, ratio, "×"),
    ]


OPTIONS = [
    rounds(3, "blocks of each"),
    number("--ranks", 4, "how many ranks"),
    number("--steps", 300, "steps of a block"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
