"""Compares the formats in which an all-reduce can send floats between hosts.

    sudo python benchmarks/compression.py [--hosts 2] [--each 1] [--rate 1gbit] [--sizes 1M 64M] [--json FILE]

The hosts are network namespaces on a bridge, each with its own link of the given rate (tc tbf; "none": as
fast as the kernel allows). Each call averages an array of float32 in place: as it is; cast to bfloat16 and
back, as Compression.bf16 does; in the wire formats int8 and fp8, without and with error feedback. The formats
take turns in blocks of calls. The error is that of one average of normally distributed numbers, relative to
the exact one in the norm.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from common.harness import Benchmark, Results
from common.jobs import Job
from common.measure import Interval, block_calls, median, medians, ratio
from common.options import MIB, number, rounds, sizes
from common.over_hosts import HOST_OPTIONS, hosts_of, ranks_on
from common.report import Target, at_least, readable, show_rows

WORKER = "workers.compression"
SIZES = [MIB, 64 * MIB]
BYTES_PER_BLOCK = 64 * MIB
LEAST_CALLS, MOST_CALLS = 2, 20
PORT = 29_700


@dataclass
class Row:
    """The result of one format at one size."""

    bytes: int
    format: str
    milliseconds: float  # median of one call, on the slowest rank
    speed: Interval  # float32's time divided by this one's
    error: float  # largest of all ranks


COLUMNS = [
    ("size", lambda row: readable(row.bytes)),
    ("format", lambda row: row.format),
    ("median ms", lambda row: f"{row.milliseconds:,.3f}"),
    ("float32's time / its time", lambda row: f"{row.speed:.2f}"),
    ("relative error", lambda row: f"{row.error:.1e}"),
]


def measure(options: Namespace) -> Results:
    """Creates the hosts and measures all formats in turns."""
    with hosts_of(options) as (hosts, key):
        launcher = ranks_on(hosts, options.each, key, PORT)
        with Job(launcher, options.hosts * options.each, WORKER) as job:
            rows = [row for size in options.sizes for row in measure_size(job, size, options)]
            sent = job.ask("wire_bytes")[0]
    facts = {"hosts": options.hosts, "each": options.each, "rate": options.rate}
    return {**facts, "wire bytes of rank 0": sent, "rows": rows}


def measure_size(job: Job, size: int, options: Namespace) -> list[Row]:
    errors = job.ask("prepare", size=size)
    calls = block_calls(size, BYTES_PER_BLOCK, LEAST_CALLS, MOST_CALLS)
    blocks = job.blocks(list(errors[0]), options.rounds, calls)
    exact = medians(blocks["float32"])
    rows = []
    for name, found in blocks.items():
        times = medians(found)
        worst = max(of_rank[name] for of_rank in errors)
        rows.append(Row(size, name, median(times) / 1e3, ratio(exact, times), worst))
    return rows


def show(results: Results) -> None:
    place = f"{results['hosts']} hosts × {results['each']} ranks, links of {results['rate']}"
    title = f"All-reduce, average of float32, {place}"
    show_rows(title, COLUMNS, results["rows"], text_columns=2, group=lambda row: row.bytes)


def judge(results: Results) -> list[Target]:
    """Returns the target for large tensors on slow links."""
    largest = max(row.bytes for row in results["rows"])
    place = f"{readable(largest)}, {results['hosts']} hosts × {results['each']}, {results['rate']}"
    return [
        at_least(f"int8's speed / float32's, {place}", 1.7, row.speed.median)
        for row in results["rows"]
        if (row.bytes, row.format, results["rate"]) == (largest, "int8", "1gbit")
    ]


OPTIONS = [
    rounds(5, "blocks of each"),
    *HOST_OPTIONS,
    number("--each", 1, "ranks on each"),
    sizes(SIZES),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
