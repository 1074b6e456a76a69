"""Compares a collective between hosts with its peers and with the speed of the links.

    sudo python benchmarks/hosts.py [--hosts 2] [--each 2] [--rate 1gbit] [--sizes 64K 1M 64M] [--json FILE]
                                    [--collective reducescatter]
    python benchmarks/hosts.py --loopback [--sizes 1K 64K 1M 16M 64M] [--encrypted] [--set sockets_per_link=2]

The hosts are network namespaces on a bridge, each with its own link of the given rate (tc tbf; "none": as
fast as the kernel allows). With --loopback there are two ranks of this host, each of which takes itself for a
host. sirtaki chooses its algorithm, or uses the one that the row names. The useful rate is the number of
bytes that must leave each host, divided by the time: 2 (H - 1) / H of the tensor's bytes among H hosts for
every algorithm of all-reduce (the default), half of that for a reduce-scatter or an all-gather. The stream is
the throughput of plain TCP streams from each host to the next, all at the same time, in the same run.
"""

from __future__ import annotations

import os
import socket
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common.harness import Benchmark, Results
from common.jobs import Job, hvdrun
from common.measure import alternate, block_calls, median
from common.options import KIB, MIB, Option, choice, number, rounds, sizes
from common.over_hosts import HOST_OPTIONS, hosts_of, mpirun_on, ranks_on
from common.peer_jobs import MpiRank, Rank
from common.peers import OPERATIONS, Array, gloo, sirtaki_of
from common.report import Columns, Row, Table, Target, at_least, make_table, readable

import sirtaki.numpy as hvd
from sirtaki.bench.implementations import Bound, Implementation
from sirtaki.bindings.bootstrap import world_builder

SIZES = [64 * KIB, MIB, 64 * MIB]
BETWEEN_HOSTS = ("allreduce", "reducescatter", "allgather")
ALGORITHMS = ("auto", "direct", "ring", "hierarchical")
BYTES_PER_BLOCK = 64 * MIB
LEAST_CALLS, MOST_CALLS = 2, 20
PORT = 29_600
PIECE = MIB  # of one write or read
FIRST_PORT = 30_500
LOOPBACK = "BENCHMARK_OVER_LOOPBACK"


class Stream:
    """A plain stream, to measure the links: sends as many bytes to the next rank as it receives from the
    previous rank, with one thread for each direction. It is no all-reduce, so its result is not checked.
    """

    version = "one TCP stream each way, a thread a direction, writes of 1 MiB"

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        following = (rank + 1) % size
        with socket.create_server(("", FIRST_PORT + rank)) as listening:
            (folder / f"stream{rank}").write_text("here")
            while not all((folder / f"stream{other}").exists() for other in range(size)):
                pass
            addresses = os.environ["STREAM_ADDRESSES"].split(",")
            self._to = socket.create_connection((addresses[following], FIRST_PORT + following))
            self._from, _ = listening.accept()

    def bind(self, _: Any, array: Array, output: Array) -> Bound:
        out, into = memoryview(np.ones_like(array)).cast("B"), memoryview(output).cast("B")

        def send() -> None:
            for begin in range(0, len(out), PIECE):
                self._to.sendall(out[begin : begin + PIECE])

        def call() -> None:
            sending = threading.Thread(target=send)
            sending.start()
            received = 0
            while received < len(into):
                received += self._from.recv_into(into[received : received + PIECE])
            sending.join()

        return Bound(call, partial(np.copyto, array), lambda: None)  # type: ignore[arg-type,return-value]


class HostRank(Rank):
    """A rank of one implementation: "sirtaki", "gloo" or "stream"."""

    def __init__(self, folder: Path, who: str) -> None:
        if who == "stream":
            number, size = int(os.environ["SIRTAKI_RANK"]), int(os.environ["SIRTAKI_SIZE"])
            peer: Implementation = Stream(number, size, folder)
        else:
            if LOOPBACK in os.environ:  # each rank takes itself for a host
                world_builder.host_identity = lambda: f"host{os.environ['SIRTAKI_RANK']}"
            hvd.init()
            number, size = hvd.rank(), hvd.size()
            peer = gloo(number, size) if who == "gloo" else sirtaki_of("numpy", number, size)
        super().__init__({who: peer}, number, size)


COLUMNS: Columns = {
    "size": lambda row: readable(row["bytes"]),
    "who": "{who}",
    "median ms": "{milliseconds:,.3f}",
    "useful GB/s": "{useful_rate:.4f}",
    "of the stream": "{share:.2f}",
}


def measure(options: Namespace) -> Results:
    """Starts the ranks and measures all implementations in turns."""
    if options.loopback:
        options.hosts, options.each, options.rate = 2, 1, "loopback"
    with started(options) as jobs:
        versions = {who: next(iter(job.ask("versions")[0].values())) for who, job in jobs.items()}
        rows = [row for size in options.sizes for row in measure_size(jobs, size, options)]
    facts = {name: getattr(options, name) for name in ("collective", "hosts", "each", "rate")}
    return {**facts, "versions": versions, "rows": rows}


@contextmanager
def started(options: Namespace) -> Iterator[dict[str, Job]]:
    """Starts the ranks of one implementation after the other; yields the jobs by name."""
    with (
        nullcontext(([], Path())) if options.loopback else hosts_of(options) as (hosts, key),
        ExitStack() as stack,
    ):
        size = options.hosts * options.each

        def launch(index: int, each: int = options.each) -> list[str]:
            return hvdrun(size) if options.loopback else ranks_on(hosts, each, key, PORT + index)

        jobs: dict[str, Job] = {}
        for index, (who, settings) in enumerate(variants(options).items()):
            jobs[who] = stack.enter_context(Job(launch(index), size, HostRank, "sirtaki", settings=settings))
        if options.peers:
            jobs["gloo"] = stack.enter_context(Job(launch(len(jobs)), size, HostRank, "gloo"))
            if not options.loopback and (mpi := mpirun_on(hosts, options.each)) is not None:
                jobs["mpi"] = stack.enter_context(Job(mpi, size, MpiRank))
        if options.over_mpi:
            settings = {"SIRTAKI_TRANSPORT": "mpi"}
            if (mpi := mpirun_on(hosts, options.each, *settings)) is None:
                raise SystemExit("--over-mpi needs Open MPI's mpirun")
            over = Job(mpi, size, HostRank, "sirtaki", settings=settings)
            jobs["sirtaki, over mpi"] = stack.enter_context(over)
        addresses = [host.address for host in hosts] or ["127.0.0.1"] * 2
        settings = {"STREAM_ADDRESSES": ",".join(addresses)}
        stream = Job(launch(len(jobs), 1), options.hosts, HostRank, "stream", settings=settings)
        yield {**jobs, "stream": stack.enter_context(stream)}


def variants(options: Namespace) -> dict[str, dict[str, str]]:
    """Returns the settings of each of sirtaki's jobs."""
    common = {f"SIRTAKI_{name.upper()}": value for name, value in (one.split("=") for one in options.set)}
    if options.loopback:
        common |= {LOOPBACK: "1", "SIRTAKI_NETWORK_INTERFACES": "lo"}
    names = [name for name in options.algorithms if options.each > 1 or name != "hierarchical"]
    found = {
        "sirtaki" if name == "auto" else f"sirtaki, {name}": {**common, "SIRTAKI_CPU_ALGORITHM": name}
        for name in names
    }
    return found | ({"sirtaki, encrypted": {**common, "SIRTAKI_ENCRYPT": "1"}} if options.encrypted else {})


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
    crossing = OPERATIONS[options.collective].bus_factor(options.hosts) * size
    stream = size / times["stream"] / 1e3
    rows = []
    for who, time in times.items():
        useful_rate = (size if who == "stream" else crossing) / time / 1e3
        row = {"bytes": size, "who": who, "milliseconds": time / 1e3, "useful_rate": useful_rate}
        rows.append({**row, "share": useful_rate / stream})
    return rows


def tables(results: Results) -> list[Table]:
    place = f"{results['hosts']} hosts × {results['each']} ranks, links of {results['rate']}"
    title = f"{results['collective']}, float32, {place}"
    return [make_table(title, COLUMNS, results["rows"], group="bytes", text_columns=2)]


def judge(results: Results) -> list[Target]:
    """Returns the targets for large tensors."""
    rows = results["rows"]
    most = max(row["bytes"] for row in rows)
    largest = {row["who"]: row for row in rows if row["bytes"] == most}
    size = readable(most)
    place = f"{size}, {results['hosts']} hosts × {results['each']}, {results['rate']}"
    bound = 0.9 if results["rate"].endswith("bit") else 0.85
    targets = []
    if "sirtaki" in largest:
        targets.append(at_least(f"useful rate of the stream's, {place}", bound, largest["sirtaki"]["share"]))
    if {"sirtaki, hierarchical", "sirtaki, direct"} <= largest.keys():
        direct, own = (largest[f"sirtaki, {name}"]["milliseconds"] for name in ("direct", "hierarchical"))
        targets.append(at_least(f"hierarchical's speed / direct's, {place}", 1.0, direct / own))
    return targets


OPTIONS = [
    rounds(3, "blocks of each"),
    *HOST_OPTIONS,
    number("--each", 2, "ranks on each"),
    sizes(SIZES),
    choice("--algorithms", ALGORITHMS, "sirtaki's (all)"),
    Option("--collective", default="allreduce", choices=BETWEEN_HOSTS, help="which (allreduce)"),
    Option("--loopback", action="store_true", help="two ranks of this host, over TCP; needs no privileges"),
    Option("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of sirtaki"),
    Option("--encrypted", action="store_true", help="also sirtaki with --encrypt"),
    Option("--over-mpi", action="store_true", help="also sirtaki with SIRTAKI_TRANSPORT=mpi, under mpirun"),
    Option("--no-peers", dest="peers", action="store_false", help="neither gloo nor Open MPI"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
