"""Compares all-reduce with its peers: the time of an in-place sum of float32 among ranks of one machine.

    python benchmarks/allreduce.py [-np 2] [--sizes 4 1K 1M 64M] [--rounds 15] [--json FILE]

sirtaki (from C, numpy and torch, and from C with tensors in memory that the ranks share), gloo, Open MPI and
the memory-bound prototype take turns in blocks of calls, so that other load on the machine affects them
alike. A ratio is the median of the ratios of adjacent blocks.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from common import native
from common.harness import Benchmark, Results
from common.latency import Row, least_ratio, make_row, show_latency
from common.measure import median_interval
from common.options import KIB, MIB, RANKS, rounds, sizes
from common.peer_jobs import COLD_UP_TO, peer_jobs
from common.report import Target, at_least, at_most, readable

SHARED = "sirtaki C, shared"  # tensors in memory that the ranks share
SHARED_SPEEDS = {
    MIB: 3.5,
    4 * MIB: 3.0,
    16 * MIB: 2.2,
    64 * MIB: 1.7,
}  # targets, as multiples of the bound's speed
SIZES = [4, KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]


def measure(options: Namespace) -> Results:
    bare = native.run("driver", options.ranks, *options.sizes)
    rows = [row for measured in bare for row in bare_rows(measured)]
    with peer_jobs(options.ranks) as jobs:
        for size in options.sizes:
            rows += jobs.measure("allreduce", size, options.rounds, cold=True)
    rows.sort(key=lambda row: row.bytes)
    return {"versions": jobs.versions, "ranks": options.ranks, "rows": rows}


def bare_rows(bare: dict[str, Any]) -> list[Row]:
    """Returns the driver's measurement at one size as rows."""
    ranks, size = bare["ranks"], bare["bytes"]
    rows = []
    for who, name in (("sirtaki C", "sirtaki"), (SHARED, "shared"), ("memory bound C", "bound")):
        row = make_row("allreduce", size, who, ranks, [bare[f"{name}_us"]])
        row.p99 = bare[f"{name}_p99_us"]
        rows.append(row)
    rows[0].cold = bare["cold_us"] if size <= COLD_UP_TO else None
    rows[1].slower = median_interval(
        [own / shared for own, shared in zip(bare["ratios"], bare["shared_ratios"], strict=True)]
    )
    rows[1].speed = median_interval(bare["shared_ratios"])
    rows[2].slower = median_interval(bare["ratios"])
    return rows


def show(results: Results) -> None:
    show_latency(results["rows"], results["ranks"])


def judge(results: Results) -> list[Target]:
    """Returns the targets that these rows can answer; the worst size of a range counts."""
    rows, ranks = results["rows"], results["ranks"]
    if ranks != 2:
        crowded = least_ratio(rows, "mpi", 64 * KIB, 256 * MIB)
        if crowded is None:
            return []
        return [at_most(f"{ranks} ranks, ≥ 64 KiB, time / Open MPI's", 1.3, 1 / crowded, "×")]
    bounds = [
        ("memory bound C", MIB, 256 * MIB, 0.8, "speed from C / memory bound's, ≥ 1 MiB"),
        ("memory bound", MIB, 256 * MIB, 0.8, "speed from numpy / memory bound's, ≥ 1 MiB"),
        ("gloo", MIB, 16 * MIB, 10, "speed / gloo's, 1 to 16 MiB"),
        ("gloo", 64 * MIB, 64 * MIB, 5, "speed / gloo's, 64 MiB"),
        ("mpi", MIB, 16 * MIB, 1.5, "speed / Open MPI's, 1 to 16 MiB"),
        ("mpi", 64 * MIB, 64 * MIB, 3, "speed / Open MPI's, 64 MiB"),
    ]
    targets = []
    for who, low, high, bound, what in bounds:
        value = least_ratio(rows, who, low, high)
        if value is not None:
            targets.append(at_least(what, bound, value))
    for row in rows:
        if row.speed and row.bytes in SHARED_SPEEDS:
            what = f"speed in shared memory / memory bound's, {readable(row.bytes)}"
            targets.append(at_least(what, SHARED_SPEEDS[row.bytes], row.speed.median))
    for who, microseconds in (("sirtaki C", 5.0), ("sirtaki numpy", 15.0), ("sirtaki torch", 15.0)):
        small = [row.median for row in rows if row.who == who and row.bytes <= KIB]
        if small:
            targets.append(at_most(f"all-reduce ≤ 1 KiB, {who}", microseconds, max(small), "µs"))
    return targets


BENCHMARK = Benchmark(__doc__, [RANKS, sizes(SIZES), rounds(15, "blocks of each")], measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
