"""Measures init() by the number of ranks on one host: how long it takes, where, and what it opens.

Usage: python benchmarks/scale.py [--ranks 2 8 16 32 64] [--rounds 5] [--json FILE]

The ranks have imported everything, and begin at the same moment. A start ends when the last rank has left
init(). Phases are those of the median rank: elapsed time, in which it mostly waits for others, and the time
of its processor. The first all-reduce of one number follows.
"""

from __future__ import annotations

import functools
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import median
from common.options import KIB, Option, rounds
from common.report import Columns, Row, Table, Target, at_most, make_table

import sirtaki.numpy as hvd
from sirtaki.bindings.context import Context
from sirtaki.runner.rendezvous import memory, world_builder
from sirtaki.runner.rendezvous.rendezvous_client import RendezvousClient

RANKS = [2, 8, 16, 32, 64]
MOST_SECONDS, MOST_RANKS = 1.0, 64
# The parts of init(): the owner of a function, and its name there.
PHASES: dict[str, tuple[Any, str]] = {
    "join": (RendezvousClient, "connect"),
    "gather": (RendezvousClient, "all_gather"),
    "links": (world_builder, "connect_all"),
    "memory": (memory.MemoryLinks, "exchange"),
    "start": (Context, "start"),
}


class StartingRank:
    """Becomes a rank when it is told to, and reports the cost."""

    def __init__(self, _: Path) -> None:
        self.number = int(os.environ["SIRTAKI_RANK"])
        hvd.init(rank=0, size=1)  # imports everything that init() needs
        hvd.shutdown()
        self._phases: dict[str, list[float]] = {}
        for phase, (owner, name) in PHASES.items():
            setattr(owner, name, self._timed(phase, getattr(owner, name)))

    def start(self) -> dict[str, Any]:
        """Returns the moments at which init() began and ended, the seconds of its phases (elapsed, and of the
        processor), and what init() has opened and kept.
        """
        self._phases = {phase: [0.0, 0.0] for phase in PHASES}
        descriptors, resident = count_descriptors(), private_bytes()
        began, processor = time.monotonic(), time.process_time()
        hvd.init()
        ended, processor = time.monotonic(), time.process_time() - processor
        opened = {"descriptors": count_descriptors() - descriptors, "memory": private_bytes() - resident}
        return {"began": began, "ended": ended, "processor": processor, "phases": self._phases, **opened}

    def first(self) -> float:
        """Returns the seconds that the first all-reduce takes."""
        began = time.perf_counter()
        assert hvd.allreduce(1.0, op=hvd.Sum, name="first") == hvd.size()
        return time.perf_counter() - began

    def _timed(self, phase: str, function: Any) -> Any:
        @functools.wraps(function)
        def measured(*arguments: Any, **options: Any) -> Any:
            elapsed, processor = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                total = self._phases[phase]
                total[0] += time.perf_counter() - elapsed
                total[1] += time.thread_time() - processor

        return measured


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
    return {**row, "phases": median_phases([one["phases"] for one in starts])}


def combine(rows: list[Row]) -> Row:
    """Returns the medians over the rounds, and the worst start."""
    phases = median_phases([row.pop("phases") for row in rows])
    worst = max(row["seconds"] for row in rows)
    return {
        **{name: median([row[name] for row in rows]) for name in rows[0]},
        "worst": worst,
        "phases": phases,
    }


def median_phases(found: list[dict[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Returns the medians of the elapsed time and the processor's time of each phase."""
    return {
        name: (median([one[name][0] for one in found]), median([one[name][1] for one in found]))
        for name in found[0]
    }


def processor_seconds(process: int) -> float:
    """Returns the time of the processor that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tables(results: Results) -> Iterator[Table]:
    rows = results["rows"]
    yield make_table("Starts on one host", COLUMNS, rows)
    cells = [
        [str(row["ranks"]), *(f"{one * 1e3:.1f} ({used * 1e3:.1f})" for one, used in row["phases"].values())]
        for row in rows
    ]
    yield Table("Phases of the median rank, ms (of its processor)", ["ranks", *PHASES], cells)


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
