"""Compares all-reduce with its peers: the time of an in-place sum of float32 among ranks of one machine.

    python benchmarks/allreduce.py [-np 2] [--sizes 4 1K 1M 64M] [--rounds 15] [--json FILE]

sirtaki (from C, numpy and torch), gloo, Open MPI and the limit prototype take turns in blocks of calls, so
that other load on the machine affects them alike. A ratio is the median of the ratios of adjacent blocks.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from common import native
from common.measure import median_interval
from common.options import KIB, MIB, add_sizes, parser
from common.report import Target, at_least, at_most, save, show_machine, show_targets
from common.turns import COLD_UP_TO, Row, least_ratio, make_row, show_rows, show_versions, turns

SIZES = [4, KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]


def main() -> None:
    options = arguments()
    show_machine()
    results, rows = measure(options.ranks, options.sizes, options.rounds)
    show(results["versions"], rows, options.ranks)
    targets = judge(rows, options.ranks)
    show_targets(targets)
    save(options.json, results, targets)


def arguments() -> argparse.Namespace:
    made = parser(__doc__, 15, "blocks of each")
    add_sizes(made, SIZES)
    return made.parse_args()


def measure(ranks: int, sizes: list[int], rounds: int) -> tuple[dict[str, Any], list[Row]]:
    """Runs everything. Returns the contents of the JSON file, and the rows."""
    folder = native.build()
    rows = [row for bare in native.bare_calls(ranks, sizes) for row in bare_rows(bare)]
    with turns(ranks, folder) as started:
        for size in sizes:
            rows += started.measure("allreduce", size, rounds, cold=True)
    rows.sort(key=lambda row: row.bytes)
    return {"versions": started.versions, "ranks": ranks, "rows": [asdict(row) for row in rows]}, rows


def bare_rows(bare: dict[str, Any]) -> list[Row]:
    """Returns the driver's measurement at one size as rows."""
    ranks, size = bare["ranks"], bare["bytes"]
    rows = []
    for who, name in (("sirtaki C", "sirtaki"), ("limit C", "limit")):
        row = make_row("allreduce", size, who, ranks, [bare[f"{name}_us"]])
        row.p99 = bare[f"{name}_p99_us"]
        rows.append(row)
    rows[0].cold = bare["cold_us"] if size <= COLD_UP_TO else None
    rows[1].slower = median_interval(bare["ratios"])
    return rows


def show(versions: dict[str, str], rows: list[Row], ranks: int) -> None:
    show_versions(versions)
    show_rows(rows, ranks)


def judge(rows: list[Row], ranks: int) -> list[Target]:
    """Returns the targets that these rows can answer; the worst size of a range counts."""
    if ranks != 2:
        crowded = least_ratio(rows, "mpi", 64 * KIB, 256 * MIB)
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
        value = least_ratio(rows, who, low, high)
        if value is not None:
            targets.append(at_least(what, bound, value))
    for who, microseconds in (("sirtaki C", 5.0), ("sirtaki numpy", 15.0), ("sirtaki torch", 15.0)):
        small = [row.median for row in rows if row.who == who and row.bytes <= KIB]
        if small:
            targets.append(at_most(f"all-reduce ≤ 1 KiB, {who}", microseconds, max(small), "µs"))
    return targets


if __name__ == "__main__":
    main()
