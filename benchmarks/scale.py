"""Measures init() by the number of ranks on one host: how long it takes, and what it opens.

Usage: python benchmarks/scale.py [--ranks 2 8 16 32 64] [--rounds 5] [--json FILE]

The ranks have imported everything, and begin at the same moment. A start ends when the last rank has left
init(). The first all-reduce of one number follows.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.options import KIB, Option, rounds
from common.report import Columns, Row, Table, Target, at_most, make_table

import sirtaki.numpy as hvd

RANKS = [2, 8, 16, 32, 64]
MOST_SECONDS, MOST_RANKS = 1.0, 64


class StartingRank:
    """Becomes a rank when it is told to, and reports the cost."""

    def __init__(self, _: Path) -> None:
        self.number = int(os.environ["SIRTAKI_RANK"])
        hvd.init(rank=0, size=1)  # imports everything that init() needs
        hvd.shutdown()

    def start(self) -> dict[str, Any]:
        """Returns the moments at which init() began and ended, the seconds of the processor, and what init()
        has opened and kept.
        """
        descriptors, resident = count_descriptors(), private_bytes()
        began, processor = time.monotonic(), time.process_time()
        hvd.init()
        ended, processor = time.monotonic(), time.process_time() - processor
        opened = {"descriptors": count_descriptors() - descriptors, "memory": private_bytes() - resident}
        return {"began": began, "ended": ended, "processor": processor, **opened}

    def first(self) -> float:
        """Returns the seconds that the first all-reduce takes."""
        began = time.perf_counter()
        assert hvd.allreduce(1.0, op=hvd.Sum, name="first") == hvd.size()
        return time.perf_counter() - began


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def private_bytes() -> int:
    """Returns the memory that is this process's own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


COLUMNS: Columns = {
    "ranks": "{ranks}",
    "init, ms": lambda row: f"{row['seconds'] * 1e3:.0f}",
    "worst": lambda row: f"{row['worst'] * 1e3:.0f}",
    "processor of a rank, ms": lambda row: f"{row['processor'] * 1e3:.1f}",
    "of hvdrun": lambda row: f"{row['launcher'] * 1e3:.0f}",
    "first all-reduce, ms": lambda row: f"{row['first'] * 1e3:.1f}",
    "descriptors": "{descriptors:.0f}",
    "memory, KiB": lambda row: f"{row['memory'] / KIB:.0f}",
}


def measure(options: Namespace) -> Results:
    return {"rows": [combine([start(ranks) for _ in range(options.rounds)]) for ranks in options.ranks]}


def start(ranks: int) -> Row:
    """Starts a world in new processes.

    Returns the seconds until the last rank has left init(), and those of the processor of the median rank,
    and of hvdrun, which runs the rendezvous; the first all-reduce of its slowest rank; what the median rank
    has opened, and the bytes of its own that it has kept.
    """
    with Job([*hvdrun(ranks), "--oversubscribe"], ranks, StartingRank) as job:
        launcher = processor_seconds(job.process_id)
        starts = job.ask("start")
        launcher = processor_seconds(job.process_id) - launcher
        first = max(job.ask("first"))
    seconds = max(one["ended"] for one in starts) - min(one["began"] for one in starts)
    row = {"ranks": ranks, "seconds": seconds, "launcher": launcher, "first": first}
    row |= {name: median([one[name] for one in starts]) for name in ("processor", "descriptors", "memory")}
    return row


def combine(rows: list[Row]) -> Row:
    """Returns the medians over the rounds, and the worst start."""
    medians = {name: median([row[name] for row in rows]) for name in rows[0]}
    return {**medians, "worst": max(row["seconds"] for row in rows)}


def processor_seconds(process: int) -> float:
    """Returns the time of the processor that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tables(results: Results) -> list[Table]:
    return [make_table("Starts on one host", COLUMNS, results["rows"])]


def judge(results: Results) -> list[Target]:
    found = [row for row in results["rows"] if row["ranks"] == MOST_RANKS]
    return [
        at_most(f"init() of {row['ranks']} ranks on one host", MOST_SECONDS, row["seconds"], "s")
        for row in found
    ]


OPTIONS = [
    rounds(5, "starts of each number of ranks"),
    Option("--ranks", type=int, nargs="+", default=RANKS, help="how many (2 8 16 32 64)"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
