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
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from common.harness import Benchmark, Results
from common.jobs import Job
from common.measure import block_calls, median, medians, ratio
from common.options import MIB, number, rounds, sizes
from common.over_hosts import HOST_OPTIONS, hosts_of, ranks_on
from common.report import Columns, Row, Table, Target, at_least, make_table, readable
from common.serving import CompiledCalls

import sirtaki.numpy as hvd
from sirtaki.bindings import request as core
from sirtaki.bindings.library import quantise, wire_formats
from sirtaki.common.ops.collectives import Collectives
from sirtaki.common.ops.requests import ALLREDUCE_IN_PLACE, CollectiveOptions, Reduction
from sirtaki.numpy import arrays

SIZES = [MIB, 64 * MIB]
BYTES_PER_BLOCK = 64 * MIB
LEAST_CALLS, MOST_CALLS = 2, 20
PORT = 29_700
COLLECTIVES = Collectives(arrays)


class FormatRank(CompiledCalls):
    """The formats' calls. Each averages the same numbers, which differ between ranks."""

    def __init__(self, _: Path) -> None:
        super().__init__()
        hvd.init()
        self.number = hvd.rank()

    def prepare(self, size: int) -> dict[str, float]:
        """Makes the calls for arrays of `size` bytes. Returns the relative error of each format's result."""
        rng = np.random.default_rng([hvd.rank(), size])
        given = rng.standard_normal(size // 4, np.float32)
        buffer = np.empty_like(given)
        self.calls = {"float32": lambda: hvd.allreduce_(buffer, name="float32"), "bfloat16": _casting(buffer)}
        for wire in wire_formats():
            if wire.block:
                self.calls[wire.name] = _encoding(buffer, wire.name, wire.code)
                self.calls[f"{wire.name}, feedback"] = _feeding_back(buffer, wire.name, wire.code)
        errors = {}
        for name, call in self.calls.items():
            np.copyto(buffer, given)
            call()
            if name == "float32":
                exact = buffer.copy()
            errors[name] = float(np.linalg.norm(buffer - exact) / np.linalg.norm(exact))
        return errors

    def wire_bytes(self) -> dict[str, int]:
        return {**hvd.stats()["wire_bytes"]}


def _casting(buffer: np.ndarray) -> Callable[[], object]:
    def call() -> None:
        buffer[:] = hvd.allreduce(buffer.astype(ml_dtypes.bfloat16), name="bfloat16")

    return call


def _encoding(buffer: np.ndarray, name: str, code: int) -> Callable[[], object]:
    options = CollectiveOptions(name, reduction=Reduction(core.AVERAGE, wire_format=code))
    return lambda: COLLECTIVES.run(ALLREDUCE_IN_PLACE, buffer, options)


def _feeding_back(buffer: np.ndarray, name: str, code: int) -> Callable[[], object]:
    residuals = np.zeros_like(buffer)
    exchange = _encoding(buffer, name, code)

    def call() -> None:
        quantise(code, buffer.ctypes.data, residuals.ctypes.data, buffer.size)
        exchange()

    return call


COLUMNS: Columns = {
    "size": lambda row: readable(row["bytes"]),
    "format": "{format}",
    "median ms": "{milliseconds:,.3f}",
    "float32's time / its time": "{speed:.2f}",
    "relative error": "{error:.1e}",
}


def measure(options: Namespace) -> Results:
    """Creates the hosts and measures all formats in turns."""
    with hosts_of(options) as (hosts, key):
        launcher = ranks_on(hosts, options.each, key, PORT)
        with Job(launcher, options.hosts * options.each, FormatRank) as job:
            rows = [row for size in options.sizes for row in measure_size(job, size, options)]
            sent = job.ask("wire_bytes")[0]
    facts = {"hosts": options.hosts, "each": options.each, "rate": options.rate}
    return {**facts, "wire bytes of rank 0": sent, "rows": rows}


def measure_size(job: Job, size: int, options: Namespace) -> list[Row]:
    """Returns the median of a call of each format on the slowest rank, and the largest error of all ranks."""
    errors = job.ask("prepare", size=size)
    calls = block_calls(size, BYTES_PER_BLOCK, LEAST_CALLS, MOST_CALLS)
    blocks = job.blocks(list(errors[0]), options.rounds, calls)
    times = {name: medians(found) for name, found in blocks.items()}
    return [
        {
            "bytes": size,
            "format": name,
            "milliseconds": median(own) / 1e3,
            "speed": ratio(times["float32"], own),
            "error": max(of_rank[name] for of_rank in errors),
        }
        for name, own in times.items()
    ]


def tables(results: Results) -> list[Table]:
    place = f"{results['hosts']} hosts × {results['each']} ranks, links of {results['rate']}"
    title = f"All-reduce, average of float32, {place}"
    return [make_table(title, COLUMNS, results["rows"], group="bytes", text_columns=2)]


def judge(results: Results) -> list[Target]:
    """Returns the target for large tensors on slow links."""
    largest = max(row["bytes"] for row in results["rows"])
    place = f"{readable(largest)}, {results['hosts']} hosts × {results['each']}, {results['rate']}"
    return [
        at_least(f"int8's speed / float32's, {place}", 1.7, row["speed"].median)
        for row in results["rows"]
        if (row["bytes"], row["format"], results["rate"]) == (largest, "int8", "1gbit")
    ]


OPTIONS = [
    rounds(5, "blocks of each"),
    *HOST_OPTIONS,
    number("--each", 1, "ranks on each"),
    sizes(SIZES),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
