"""Implementations that take turns in blocks of calls, and the resulting rows of the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.collectives import COLLECTIVES
from common.jobs import Job, hvdrun, mpirun
from common.measure import Interval, median, median_interval, quantile
from common.options import MIB
from common.report import readable, show_table

BYTES_PER_BLOCK = 32 * MIB
LEAST_CALLS, MOST_CALLS = 4, 64
COLD_CALLS, COLD_UP_TO = 20, MIB
WORKER = "workers.collectives"
# The baseline of each comparison: the same layer of sirtaki.
CORE = "sirtaki core"
SAME_LAYER = {
    "gloo": "sirtaki torch",
    "mpi": "sirtaki numpy",
    "limit": "sirtaki numpy",
    "limit C": "sirtaki C",
}


@dataclass
class Row:
    """One implementation of one operation at one size; times in microseconds, of the slowest rank."""

    collective: str
    bytes: int
    who: str
    median: float
    p99: float
    algbw: float  # 10^9 bytes per second
    busbw: float
    cold: float | None = None
    slower: Interval | None = None  # its time as a multiple of that of sirtaki's same layer
    slower_than_core: Interval | None = None  # its time as a multiple of that of sirtaki's C functions


def make_row(collective: str, size: int, who: str, ranks: int, times: list[float]) -> Row:
    middle = median(times)
    algbw = size / middle / 1e3
    factor = COLLECTIVES[collective].bus_factor(ranks)
    return Row(collective, size, who, middle, quantile(times, 0.99), algbw, algbw * factor)


class Turns:
    """The ranks of sirtaki and its peers under hvdrun, and those of MPI under mpirun."""

    def __init__(self, jobs: list[Job], ranks: int) -> None:
        self._jobs, self._ranks = jobs, ranks
        self.versions: dict[str, str] = {}
        for job in jobs:
            self.versions |= job.ask("versions")[0]

    def measure(self, collective: str, size: int, rounds: int, *, cold: bool = False) -> list[Row]:
        """Returns one row for each implementation, from `rounds` blocks each, in turns."""
        owners = {
            who: job for job in self._jobs for who in job.ask("prepare", collective=collective, size=size)[0]
        }
        calls = max(LEAST_CALLS, min(MOST_CALLS, BYTES_PER_BLOCK // max(size, 1)))
        blocks: dict[str, list[list[float]]] = {who: [] for who in owners}
        for _ in range(rounds):
            for who, job in owners.items():
                blocks[who].append(slowest(job.ask("block", who=who, calls=calls)))
        rows = []
        for who in owners:
            times = [time for block in blocks[who] for time in block]
            row = make_row(collective, size, who, self._ranks, times)
            row.slower = compare(blocks, who, SAME_LAYER.get(who, ""))
            row.slower_than_core = compare(blocks, who, CORE) if who in SAME_LAYER else None
            if cold and who.startswith("sirtaki") and size <= COLD_UP_TO:
                row.cold = median(slowest(owners[who].ask("cold", who=who, calls=COLD_CALLS)))
            rows.append(row)
        return rows


def compare(blocks: dict[str, list[list[float]]], who: str, other: str) -> Interval | None:
    """Returns one's time as a multiple of the other's, by block; None if the other was not measured."""
    if other not in blocks:
        return None
    pairs = zip(blocks[who], blocks[other], strict=True)
    return median_interval([median(mine) / median(its) for mine, its in pairs])


def slowest(times: list[list[float]]) -> list[float]:
    """Returns the latency of each call: that of its slowest rank."""
    return [max(of_ranks) for of_ranks in zip(*times, strict=True)]


@contextmanager
def turns(ranks: int, native: Path, settings: Mapping[str, str] | None = None) -> Iterator[Turns]:
    """Starts the ranks, with the native part in folder `native`, and ends them.

    `settings` are added to the environment of sirtaki's ranks.
    """
    with ExitStack() as stack:
        own = Job(hvdrun(ranks), ranks, WORKER, "hvdrun", str(native), settings=settings)
        jobs = [stack.enter_context(own)]
        launcher = mpirun(ranks)
        if launcher is None:
            print(
                "no mpirun with mpi4py: MPI is left out (Debian: apt install openmpi-bin; pip install mpi4py)"
            )
        else:
            jobs.append(stack.enter_context(Job(launcher, ranks, WORKER, "mpirun", str(native))))
        yield Turns(jobs, ranks)


def show_versions(versions: dict[str, str]) -> None:
    for who, version in versions.items():
        print(f"{who}: {version}")


def show_rows(rows: list[Row], ranks: int) -> None:
    """Prints the table of one collective."""
    has_cold = any(row.cold is not None for row in rows)
    table: list[list[str]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.bytes != row.bytes:
            table.append([])
        table.append(_cells(row, has_cold))
    head = ["size", "who", "median µs", "p99 µs", *["cold µs"] * has_cold]
    head += ["algbw GB/s", "busbw GB/s", "time / sirtaki's"]
    dtype = ", float32" if rows[0].bytes else ""
    title = f"{COLLECTIVES[rows[0].collective].title}{dtype}, {ranks} ranks"
    show_table(title, head, table, text_columns=2)


def _cells(row: Row, has_cold: bool) -> list[str]:
    slower = ""
    if row.slower:
        slower = f"{row.slower.median:.2f} ({row.slower.low:.2f} to {row.slower.high:.2f})"
    cold = [f"{row.cold:.1f}" if row.cold is not None else ""] * has_cold
    size = readable(row.bytes) if row.bytes else ""
    speeds = [f"{row.algbw:.3f}", f"{row.busbw:.3f}"] if row.bytes else ["", ""]
    return [size, row.who, f"{row.median:,.1f}", f"{row.p99:,.1f}", *cold, *speeds, slower]


def least_ratio(rows: list[Row], who: str, low: int, high: int) -> float | None:
    """Returns the lowest ratio of an implementation's time to sirtaki's, in a range of sizes."""
    found = [row.slower.median for row in rows if row.who == who and low <= row.bytes <= high and row.slower]
    return min(found, default=None)
