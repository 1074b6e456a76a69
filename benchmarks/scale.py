"""Measures init() by the number of ranks on one host: how long it takes, where, and what it opens.

Usage: python benchmarks/scale.py [--ranks 2 8 16 32 64] [--rounds 5] [--json FILE]

The ranks have imported everything, and begin at the same moment. A start ends when the last rank has left
init(). Phases are those of the median rank: elapsed time, in which it mostly waits for others, and the time
of its processor. The first all-reduce of one number follows.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.options import KIB, Option, rounds
from common.report import Target, at_most, show_rows, show_table

RANKS = [2, 8, 16, 32, 64]
MOST_SECONDS, MOST_RANKS = 1.0, 64


@dataclass
class Row:
    """Starts of one number of ranks: medians over the rounds, in seconds and bytes."""

    ranks: int
    seconds: float
    worst: float
    processor: float  # of the median rank
    launcher: float  # of hvdrun's processor, which runs the rendezvous
    first: float  # the first all-reduce, of its slowest rank
    descriptors: int  # that the median rank has opened
    memory: float  # bytes of its own that the median rank has kept
    phases: dict[str, tuple[float, float]]  # elapsed, and of the processor, of the median rank


COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("ranks", lambda row: str(row.ranks)),
    ("init, ms", lambda row: f"{row.seconds * 1e3:.0f}"),
    ("worst", lambda row: f"{row.worst * 1e3:.0f}"),
    ("processor of a rank, ms", lambda row: f"{row.processor * 1e3:.1f}"),
    ("of hvdrun", lambda row: f"{row.launcher * 1e3:.0f}"),
    ("first all-reduce, ms", lambda row: f"{row.first * 1e3:.1f}"),
    ("descriptors", lambda row: str(row.descriptors)),
    ("memory, KiB", lambda row: f"{row.memory / KIB:.0f}"),
]


def measure(options: Namespace) -> Results:
    return {"rows": [combine([start(ranks) for _ in range(options.rounds)]) for ranks in options.ranks]}


def start(ranks: int) -> Row:
    """Starts a world in new processes."""
    with Job([*hvdrun(ranks), "--oversubscribe"], ranks, "workers.scale") as job:
        launcher = processor_seconds(job.process_id)
        starts = job.ask("start")
        launcher = processor_seconds(job.process_id) - launcher
        return make_row(starts, launcher, max(job.ask("first")))


def make_row(starts: list[dict[str, Any]], launcher: float, first: float) -> Row:
    seconds = max(one["ended"] for one in starts) - min(one["began"] for one in starts)
    names = starts[0]["phases"]
    return Row(
        ranks=len(starts),
        seconds=seconds,
        worst=seconds,
        processor=median([one["processor"] for one in starts]),
        launcher=launcher,
        first=first,
        descriptors=round(median([one["descriptors"] for one in starts])),
        memory=median([one["bytes"] for one in starts]),
        phases={name: median_pair([one["phases"][name] for one in starts]) for name in names},
    )


def combine(rows: list[Row]) -> Row:
    def middle(of: Callable[[Row], float]) -> float:
        return median([of(row) for row in rows])

    return Row(
        ranks=rows[0].ranks,
        seconds=middle(lambda row: row.seconds),
        worst=max(row.seconds for row in rows),
        processor=middle(lambda row: row.processor),
        launcher=middle(lambda row: row.launcher),
        first=middle(lambda row: row.first),
        descriptors=round(middle(lambda row: row.descriptors)),
        memory=middle(lambda row: row.memory),
        phases={name: median_pair([row.phases[name] for row in rows]) for name in rows[0].phases},
    )


def median_pair(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    elapsed, processor = zip(*pairs, strict=True)
    return median(elapsed), median(processor)


def processor_seconds(process: int) -> float:
    """Returns the time of the processor that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(results: Results) -> None:
    rows = results["rows"]
    show_rows("Starts on one host", COLUMNS, rows)
    head = ["ranks", *rows[0].phases]
    cells = [
        [
            str(row.ranks),
            *(f"{elapsed * 1e3:.1f} ({used * 1e3:.1f})" for elapsed, used in row.phases.values()),
        ]
        for row in rows
    ]
    show_table("Phases of the median rank, ms (of its processor)", head, cells)


def judge(results: Results) -> list[Target]:
    found = [row for row in results["rows"] if row.ranks == MOST_RANKS]
    return [
        at_most(f"init() of {row.ranks} ranks on one host", MOST_SECONDS, row.seconds, "s") for row in found
    ]


OPTIONS = [
    rounds(5, "starts of each number of ranks"),
    Option("--ranks", type=int, nargs="+", default=RANKS, help="how many (2 8 16 32 64)"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
