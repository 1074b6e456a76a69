"""Compares a collective between hosts with its peers and with the speed of the links.

    sudo python benchmarks/hosts.py [--hosts 2] [--each 2] [--rate 1gbit] [--sizes 64K 1M 64M] [--json FILE]
                                    [--collective reducescatter]

The hosts are network namespaces on a bridge, each with its own link of the given rate (tc tbf; "none": as
fast as the kernel allows). sirtaki chooses its algorithm, or uses the one that the row names. The useful rate
is the number of bytes that must leave each host, divided by the time: 2 (H - 1) / H of the tensor's bytes
among H hosts for every algorithm of all-reduce (the default), half of that for a reduce-scatter or an
all-gather. The stream is the throughput of plain TCP streams from each host to the next, all at the same
time, in the same run.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.collectives import COLLECTIVES
from common.harness import Benchmark, Results
from common.jobs import Job
from common.measure import alternate, block_calls, median
from common.options import KIB, MIB, Option, choice, number, rounds, sizes
from common.over_hosts import HOST_OPTIONS, hosts_of, mpirun_on, ranks_on
from common.report import Target, at_least, readable, show_rows

if TYPE_CHECKING:
    from network import Host

WORKER = "workers.hosts"
SIZES = [64 * KIB, MIB, 64 * MIB]
BETWEEN_HOSTS = ("allreduce", "reducescatter", "allgather")
ALGORITHMS = ("auto", "direct", "ring", "hierarchical")
BYTES_PER_BLOCK = 64 * MIB
LEAST_CALLS, MOST_CALLS = 2, 20
PORT = 29_600


@dataclass
class Row:
    """The result of one implementation at one size."""

    bytes: int
    who: str
    milliseconds: float  # median of one call, on the slowest rank
    useful_rate: float  # 10^9 bytes per second that leave each host
    share: float  # fraction of the stream's


COLUMNS = [
    ("size", lambda row: readable(row.bytes)),
    ("who", lambda row: row.who),
    ("median ms", lambda row: f"{row.milliseconds:,.3f}"),
    ("useful GB/s", lambda row: f"{row.useful_rate:.4f}"),
    ("of the stream", lambda row: f"{row.share:.2f}"),
]


def measure(options: Namespace) -> Results:
    """Creates the hosts and measures all implementations in turns."""
    with hosts_of(options) as (hosts, key), ExitStack() as stack:
        jobs = {who: stack.enter_context(job) for who, job in start(hosts, options, key)}
        versions = {who: next(iter(job.ask("versions")[0].values())) for who, job in jobs.items()}
        rows = [row for size in options.sizes for row in measure_size(jobs, size, options)]
    facts = {
        "collective": options.collective,
        "hosts": options.hosts,
        "each": options.each,
        "rate": options.rate,
    }
    return {**facts, "versions": versions, "rows": rows}


def start(hosts: list[Host], options: Namespace, key: Path) -> Iterator[tuple[str, Job]]:
    """Starts the ranks of one implementation after the other; yields its name and job."""
    each = options.each
    size = len(hosts) * each
    wanted = [name for name in options.algorithms if each > 1 or name != "hierarchical"]
    variants = {
        "sirtaki" if name == "auto" else f"sirtaki, {name}": {"SIRTAKI_CPU_ALGORITHM": name}
        for name in wanted
    }
    if options.encrypted:
        variants["sirtaki, encrypted"] = {"SIRTAKI_ENCRYPT": "1"}
    for index, (who, settings) in enumerate(variants.items()):
        launcher = ranks_on(hosts, each, key, PORT + index)
        yield who, Job(launcher, size, WORKER, "sirtaki", settings=settings)
    if options.peers:
        yield "gloo", Job(ranks_on(hosts, each, key, PORT), size, WORKER, "gloo")
        if (mpi := mpirun_on(hosts, each)) is not None:
            yield "mpi", Job(mpi, size, WORKER, "mpi")
    if options.over_mpi:
        settings = {"SIRTAKI_TRANSPORT": "mpi"}
        if (mpi := mpirun_on(hosts, each, *settings)) is None:
            raise SystemExit("--over-mpi needs Open MPI's mpirun")
        yield "sirtaki, over mpi", Job(mpi, size, WORKER, "sirtaki", settings=settings)
    addresses = {"STREAM_ADDRESSES": ",".join(host.address for host in hosts)}
    launcher = ranks_on(hosts, 1, key, PORT)
    yield "stream", Job(launcher, len(hosts), WORKER, "stream", settings=addresses)


def measure_size(jobs: dict[str, Job], size: int, options: Namespace) -> list[Row]:
    collectives = {who: "allreduce" if who == "stream" else options.collective for who in jobs}
    names = {
        who: job.ask("prepare", collective=collectives[who], size=size)[0][0] for who, job in jobs.items()
    }
    calls = block_calls(size, BYTES_PER_BLOCK, LEAST_CALLS, MOST_CALLS)
    measurements = {
        who: partial(job.slowest, "block", who=names[who], calls=calls) for who, job in jobs.items()
    }
    blocks = alternate(measurements, options.rounds)
    times = {who: median([time for block in found for time in block]) for who, found in blocks.items()}
    crossing = COLLECTIVES[options.collective].bus_factor(options.hosts) * size
    stream = size / times["stream"] / 1e3
    rows = []
    for who, time in times.items():
        useful_rate = (size if who == "stream" else crossing) / time / 1e3
        rows.append(Row(size, who, time / 1e3, useful_rate, useful_rate / stream))
    return rows


def show(results: Results) -> None:
    place = f"{results['hosts']} hosts × {results['each']} ranks, links of {results['rate']}"
    title = f"{COLLECTIVES[results['collective']].title}, float32, {place}"
    show_rows(title, COLUMNS, results["rows"], text_columns=2, group=lambda row: row.bytes)


def judge(results: Results) -> list[Target]:
    """Returns the targets for large tensors."""
    rows = results["rows"]
    largest = {row.who: row for row in rows if row.bytes == max(row.bytes for row in rows)}
    size = readable(max(row.bytes for row in rows))
    place = f"{size}, {results['hosts']} hosts × {results['each']}, {results['rate']}"
    bound = 0.85 if results["rate"] == "none" else 0.9
    targets = []
    if "sirtaki" in largest:
        targets.append(at_least(f"useful rate of the stream's, {place}", bound, largest["sirtaki"].share))
    if {"sirtaki, hierarchical", "sirtaki, direct"} <= largest.keys():
        faster = largest["sirtaki, direct"].milliseconds / largest["sirtaki, hierarchical"].milliseconds
        targets.append(at_least(f"hierarchical's speed / direct's, {place}", 1.0, faster))
    return targets


OPTIONS = [
    rounds(3, "blocks of each"),
    *HOST_OPTIONS,
    number("--each", 2, "ranks on each"),
    sizes(SIZES),
    choice("--algorithms", ALGORITHMS, "sirtaki's (all)"),
    Option("--collective", default="allreduce", choices=BETWEEN_HOSTS, help="which (allreduce)"),
    Option("--encrypted", action="store_true", help="also sirtaki with --encrypt"),
    Option("--over-mpi", action="store_true", help="also sirtaki with SIRTAKI_TRANSPORT=mpi, under mpirun"),
    Option("--no-peers", dest="peers", action="store_false", help="neither gloo nor Open MPI"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
