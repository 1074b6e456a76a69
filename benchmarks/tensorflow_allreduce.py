"""Compares all-reduce in a tf.function with TensorFlow's own: MultiWorkerMirroredStrategy.

    python benchmarks/tensorflow_allreduce.py [-np 2] [--sizes 1K 1M 64M] [--rounds 9] [--json FILE]

Both run in the same processes, and take turns in blocks of calls. Each call runs a traced function that sums
one tensor of float32. A ratio is the median of the ratios of adjacent blocks. Up to 64 KiB, two more
functions take turns: one that exchanges nothing, which measures TensorFlow's own cost of a call; and one with
ten all-reduces, each of which needs the previous one's result.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from common.jobs import Job, hvdrun
from common.measure import Interval, median, median_interval
from common.options import KIB, MIB, add_sizes, parser
from common.ports import free_ports
from common.report import Target, at_least, at_most, readable, save, show_machine, show_table, show_targets

SIZES = [KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
BYTES_PER_BLOCK = 64 * MIB
LEAST_CALLS, MOST_CALLS = 3, 100


@dataclass
class Row:
    """The results of one size; times in microseconds, of the slowest rank."""

    bytes: int
    sirtaki: float
    strategy: float
    faster: Interval  # the strategy's time as a multiple of sirtaki's
    alone: float | None  # a function that exchanges nothing
    in_chain: float | None  # cost that each of ten all-reduces adds to that


def main() -> None:
    options = arguments()
    show_machine()
    results, rows = measure(options.ranks, options.sizes, options.rounds)
    show(rows, options.ranks)
    targets = judge(rows)
    show_targets(targets)
    save(options.json, results, targets)


def arguments() -> argparse.Namespace:
    made = parser(__doc__, 9, "blocks of each")
    add_sizes(made, SIZES)
    return made.parse_args()


def measure(ranks: int, sizes: list[int], rounds: int) -> tuple[dict[str, Any], list[Row]]:
    """Runs everything. Returns the contents of the JSON file, and the rows."""
    ports = ",".join(map(str, free_ports(ranks)))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with Job(hvdrun(ranks), ranks, "workers.tensorflow_allreduce", ports, settings=quiet) as job:
        versions = job.ask("versions")[0]
        rows = [measure_size(job, size, rounds) for size in sizes]
    return {"versions": versions, "ranks": ranks, "rows": [asdict(row) for row in rows]}, rows


def measure_size(job: Job, size: int, rounds: int) -> Row:
    calls = max(LEAST_CALLS, min(MOST_CALLS, BYTES_PER_BLOCK // size))
    blocks: dict[str, list[float]] = {who: [] for who in job.ask("prepare", size=size)[0]}
    for _ in range(rounds):
        for who, medians in blocks.items():
            ranks = job.ask("block", who=who, calls=calls)
            medians.append(median([max(call) for call in zip(*ranks, strict=True)]))
    mine, other = blocks["sirtaki"], blocks["MWMS"]
    ratios = [theirs / own for own, theirs in zip(mine, other, strict=True)]
    alone, in_chain = None, None
    if "chained" in blocks:
        alone = median(blocks["alone"])
        in_chain = (median(blocks["chained"]) - alone) / 10
    return Row(size, median(mine), median(other), median_interval(ratios), alone, in_chain)


def show(rows: list[Row], ranks: int) -> None:
    head = [
        "bytes",
        "sirtaki µs",
        "MWMS µs",
        "MWMS / sirtaki (95 %)",
        "GB/s",
        "no exchange µs",
        "each of 10 µs",
    ]
    lines = [
        [
            readable(row.bytes),
            f"{row.sirtaki:,.0f}",
            f"{row.strategy:,.0f}",
            f"{row.faster.median:.1f} ({row.faster.low:.1f} to {row.faster.high:.1f})",
            f"{row.bytes / row.sirtaki / 1e3:.2f}",
            "" if row.alone is None else f"{row.alone:,.0f}",
            "" if row.in_chain is None else f"{row.in_chain:,.0f}",
        ]
        for row in rows
    ]
    show_table(f"All-reduce in a tf.function, {ranks} ranks", head, lines)


def judge(rows: list[Row]) -> list[Target]:
    """Returns the targets that these rows can answer; the worst size of a range counts."""
    targets = []
    large = [row.faster.median for row in rows if row.bytes >= 4 * MIB]
    if large:
        targets.append(at_least("speed / MultiWorkerMirroredStrategy's, ≥ 4 MiB", 10, min(large)))
    small = [row.sirtaki for row in rows if row.bytes <= KIB]
    if small:
        targets.append(at_most("call of a function, ≤ 1 KiB", 150, max(small), "µs"))
    chained = [row.in_chain for row in rows if row.bytes <= KIB and row.in_chain is not None]
    if chained:
        targets.append(at_most("all-reduce ≤ 1 KiB, each of ten in a function", 150, max(chained), "µs"))
    return targets


if __name__ == "__main__":
    main()
