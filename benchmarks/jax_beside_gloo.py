"""Compares all-reduce inside jit, and a training step, with JAX's own: jax.distributed with gloo.

    python benchmarks/jax_beside_gloo.py [-np 2] [--sizes 1K 1M 64M] [--rounds 9] [--json FILE]

Both run in the same processes, and take turns in blocks of calls. Each call runs a compiled function: one
function sums an array of float32, whose memory is donated; the other takes a training step of a network of
dense layers on this rank's part of a batch. A ratio is the median of the ratios of adjacent blocks.
"""

from __future__ import annotations

import argparse
import socket
from dataclasses import asdict, dataclass
from typing import Any

from common.jobs import Job, hvdrun
from common.measure import Interval, median, median_interval
from common.options import KIB, MIB, add_sizes, parser
from common.report import readable, save, show_machine, show_table

SIZES = [KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
BYTES_PER_BLOCK = 64 * MIB
LEAST_CALLS, MOST_CALLS = 3, 100
WIDTHS = [64, 512]  # of the network's layers


@dataclass
class Row:
    """The result of one function; times in microseconds, of the slowest rank."""

    what: str
    sirtaki: float
    gloo: float
    faster: Interval  # gloo's time as a multiple of sirtaki's


def main() -> None:
    options = arguments()
    show_machine()
    results, sums, steps = measure(options.ranks, options.sizes, options.rounds)
    print(", ".join(f"{name}: {version}" for name, version in results["versions"].items()))
    show(f"All-reduce inside jit, {options.ranks} ranks", "bytes", sums)
    show(f"Training step inside jit, {options.ranks} ranks", "network", steps)
    save(options.json, results, [])


def arguments() -> argparse.Namespace:
    made = parser(__doc__, 9, "blocks of each")
    add_sizes(made, SIZES)
    return made.parse_args()


def free_port() -> int:
    """Returns a port that is free at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def measure(ranks: int, sizes: list[int], rounds: int) -> tuple[dict[str, Any], list[Row], list[Row]]:
    """Runs everything. Returns the contents of the JSON file, and the rows of both tables."""
    with Job(hvdrun(ranks), ranks, "workers.jax_beside_gloo", str(free_port())) as job:
        versions = job.ask("versions")[0]
        sums = [measure_sums(job, size, rounds) for size in sizes]
        steps = [measure_steps(job, width, rounds) for width in WIDTHS]
    rows = {"sums": [asdict(row) for row in sums], "steps": [asdict(row) for row in steps]}
    return {"versions": versions, "ranks": ranks, **rows}, sums, steps


def measure_sums(job: Job, size: int, rounds: int) -> Row:
    job.ask("prepare_sum", size=size)
    calls = max(LEAST_CALLS, min(MOST_CALLS, BYTES_PER_BLOCK // size))
    return measure_blocks(job, readable(size), rounds, calls)


def measure_steps(job: Job, width: int, rounds: int) -> Row:
    parameters = job.ask("prepare_step", width=width)[0]
    return measure_blocks(job, f"6 × Dense({width}), {parameters:,} parameters", rounds, 10)


def measure_blocks(job: Job, what: str, rounds: int, calls: int) -> Row:
    blocks: dict[str, list[float]] = {"sirtaki": [], "gloo": []}
    for _ in range(rounds):
        for who, medians in blocks.items():
            ranks = job.ask("block", who=who, calls=calls)
            medians.append(median([max(call) for call in zip(*ranks, strict=True)]))
    ratios = [theirs / own for own, theirs in zip(*blocks.values(), strict=True)]
    return Row(what, median(blocks["sirtaki"]), median(blocks["gloo"]), median_interval(ratios))


def show(title: str, what: str, rows: list[Row]) -> None:
    lines = [
        [
            row.what,
            f"{row.sirtaki:,.0f}",
            f"{row.gloo:,.0f}",
            f"{row.faster.median:.2f} ({row.faster.low:.2f} to {row.faster.high:.2f})",
        ]
        for row in rows
    ]
    show_table(title, [what, "sirtaki µs", "gloo µs", "gloo / sirtaki (95 %)"], lines)


if __name__ == "__main__":
    main()
