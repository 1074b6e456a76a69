"""All-reduce beside its peers: how long a sum of float32 takes, in place, among ranks of one machine.

    python benchmarks/allreduce.py [-np 2] [--sizes 4 1K 1M 64M] [--rounds 15] [--json FILE]

sirtaki (from C, numpy and torch), gloo, Open MPI and the limit prototype take turns in blocks of calls, so
that what else the machine does meets them alike. A ratio is the median of the ratios of neighbouring blocks.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import native
from common.jobs import Job, hvdrun, mpirun
from common.measure import Interval, median, median_interval, quantile
from common.report import Target, at_least, at_most, readable, save, show_machine, show_table, show_targets

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4, KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
BYTES_PER_BLOCK = 32 * MIB
LEAST_CALLS, MOST_CALLS = 4, 64
COLD_CALLS, COLD_UP_TO = 20, MIB
WORKER = "workers.allreduce"
# Whom each is compared with: the layer of sirtaki that does the same.
SAME_LAYER = {
    "gloo": "sirtaki torch",
    "mpi": "sirtaki numpy",
    "limit": "sirtaki numpy",
    "limit C": "sirtaki C",
}


@dataclass
class Row:
    """One implementation at one size; times in microseconds."""

    bytes: int
    who: str
    median: float
    p99: float
    algbw: float  # 10^9 bytes a second
    busbw: float
    cold: float | None = None
    slower: Interval | None = None  # its time as a multiple of that of sirtaki's same layer


def main() -> None:
    options = arguments()
    show_machine()
    results, rows = measure(options.ranks, options.sizes, options.rounds)
    show(results["versions"], rows, options.ranks)
    targets = judge(rows, options.ranks)
    show_targets(targets)
    save(options.json, results, targets)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-np", dest="ranks", type=int, default=2, help="how many ranks (2)")
    parser.add_argument(
        "--sizes", type=parse_size, nargs="+", default=SIZES, help="in bytes; 64K and 4M work"
    )
    parser.add_argument("--rounds", type=int, default=15, help="how many blocks of each (15)")
    parser.add_argument("--json", type=Path, help="write everything to this file, too")
    return parser.parse_args()


def parse_size(text: str) -> int:
    """A number of bytes, with K or M for binary multiples; whole elements only."""
    factor = {"K": KIB, "M": MIB}.get(text[-1].upper(), 1)
    return max(int(text.rstrip("kKmM")) * factor // 4, 1) * 4


def measure(ranks: int, sizes: list[int], rounds: int) -> tuple[dict[str, Any], list[Row]]:
    """Runs everything. Returns what belongs in the JSON file, and the rows."""
    folder = native.build()
    rows = [row for bare in native.bare_calls(ranks, sizes) for row in bare_rows(bare)]
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job(hvdrun(ranks), ranks, WORKER, "hvdrun", str(folder)))]
        launcher = mpirun(ranks)
        if launcher is None:
            print("no mpirun here: MPI is left out (on Debian: apt install openmpi-bin; pip install mpi4py)")
        else:
            jobs.append(stack.enter_context(Job(launcher, ranks, WORKER, "mpirun", str(folder))))
        versions = {name: text for job in jobs for name, text in job.ask("versions")[0].items()}
        owners = {name: job for job in jobs for name in job.ask("versions")[0]}
        for size in sizes:
            rows += measure_size(owners, size, ranks, rounds)
    rows.sort(key=lambda row: row.bytes)
    return {"versions": versions, "ranks": ranks, "rows": [asdict(row) for row in rows]}, rows


def measure_size(owners: dict[str, Job], size: int, ranks: int, rounds: int) -> list[Row]:
    """One row for each implementation, from blocks in turns, as rank 0 saw them."""
    calls = max(LEAST_CALLS, min(MOST_CALLS, BYTES_PER_BLOCK // size))
    for job in dict.fromkeys(owners.values()):
        job.ask("prepare", size=size)
    blocks: dict[str, list[list[float]]] = {who: [] for who in owners}
    for _ in range(rounds):
        for who, job in owners.items():
            blocks[who].append(job.ask("block", who=who, calls=calls)[0])
    rows = []
    for who in owners:
        row = make_row(size, who, ranks, [time for block in blocks[who] for time in block])
        other = blocks.get(SAME_LAYER.get(who, ""))
        if other:
            pairs = zip(blocks[who], other, strict=True)
            row.slower = median_interval([median(mine) / median(its) for mine, its in pairs])
        if who.startswith("sirtaki") and size <= COLD_UP_TO:
            row.cold = median(owners[who].ask("cold", who=who, calls=COLD_CALLS)[0])
        rows.append(row)
    return rows


def make_row(size: int, who: str, ranks: int, times: list[float]) -> Row:
    middle = median(times)
    algbw = size / middle / 1e3
    return Row(size, who, middle, quantile(times, 0.99), algbw, algbw * 2 * (ranks - 1) / ranks)


def bare_rows(bare: dict[str, Any]) -> list[Row]:
    """The driver's measurement at one size, in the same form."""
    ranks, size = bare["ranks"], bare["bytes"]
    rows = []
    for who, name in (("sirtaki C", "sirtaki"), ("limit C", "limit")):
        row = make_row(size, who, ranks, [bare[f"{name}_us"]])
        row.p99 = bare[f"{name}_p99_us"]
        rows.append(row)
    rows[0].cold = bare["cold_us"] if size <= COLD_UP_TO else None
    rows[1].slower = median_interval(bare["ratios"])
    return rows


def show(versions: dict[str, str], rows: list[Row], ranks: int) -> None:
    for who, version in versions.items():
        print(f"{who}: {version}")
    table: list[list[str]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.bytes != row.bytes:
            table.append([])
        slower = (
            f"{row.slower.median:.2f} ({row.slower.low:.2f} to {row.slower.high:.2f})" if row.slower else ""
        )
        cold = f"{row.cold:.1f}" if row.cold is not None else ""
        speeds = [f"{row.algbw:.3f}", f"{row.busbw:.3f}"]
        times = [f"{row.median:,.1f}", f"{row.p99:,.1f}", cold]
        table.append([readable(row.bytes), row.who, *times, *speeds, slower])
    head = ["size", "who", "median µs", "p99 µs", "cold µs", "algbw GB/s", "busbw GB/s", "time / sirtaki's"]
    show_table(f"All-reduce, float32 sum in place, {ranks} ranks", head, table, text_columns=2)


def judge(rows: list[Row], ranks: int) -> list[Target]:
    """The targets that these rows can answer; the worst size of a range counts."""
    if ranks != 2:
        crowded = worst(rows, "mpi", 64 * KIB, 256 * MIB)
        if crowded is None:
            return []
        return [at_most(f"{ranks} ranks, ≥ 64 KiB, time / Open MPI's", 1.3, 1 / crowded, "×")]
    bounds = [
        ("limit C", MIB, 256 * MIB, 0.8, "speed from C / limit prototype's, ≥ 1 MiB"),
        ("limit", MIB, 256 * MIB, 0.8, "speed from numpy / limit prototype's, ≥ 1 MiB"),
        ("gloo", MIB, 16 * MIB, 10, "speed / gloo's, 1 to 16 MiB"),
        ("gloo", 64 * MIB, 64 * MIB, 5, "speed / gloo's, 64 MiB"),
        ("mpi", MIB, 16 * MIB, 1.5, "speed / Open MPI's, 1 to 16 MiB"),
        ("mpi", 64 * MIB, 64 * MIB, 3, "speed / Open MPI's, 64 MiB"),
    ]
    targets = []
    for who, low, high, bound, what in bounds:
        value = worst(rows, who, low, high)
        if value is not None:
            targets.append(at_least(what, bound, value))
    for who, microseconds in (("sirtaki C", 5.0), ("sirtaki numpy", 15.0), ("sirtaki torch", 15.0)):
        small = [row.median for row in rows if row.who == who and row.bytes <= KIB]
        if small:
            targets.append(at_most(f"all-reduce ≤ 1 KiB, {who}", microseconds, max(small), "µs"))
    return targets


def worst(rows: list[Row], who: str, low: int, high: int) -> float | None:
    """The least ratio of an implementation's time to sirtaki's, in a range of sizes."""
    found = [row.slower.median for row in rows if row.who == who and low <= row.bytes <= high and row.slower]
    return min(found, default=None)


if __name__ == "__main__":
    main()
