"""Compares all-reduce between hosts with its peers and with the speed of the links.

    sudo python benchmarks/hosts.py [--hosts 2] [--each 2] [--rate 1gbit] [--sizes 64K 1M 64M] [--json FILE]

The hosts are network namespaces on a bridge, each with its own link of the given rate (tc tbf; "none": as
fast as the kernel allows). sirtaki chooses its algorithm, or uses the one that the row names. The goodput is
the number of bytes that must leave each host, divided by the time: 2 (H - 1) / H of the tensor's bytes among
H hosts for every algorithm. The stream is the throughput of plain TCP streams from each host to the next, all
at the same time, in the same run.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.jobs import Job
from common.measure import median
from common.options import KIB, MIB, parse_size, parser
from common.over_hosts import Network, missing, mpirun_on, ranks_on
from common.report import Target, at_least, readable, save, show_machine, show_table, show_targets
from common.turns import slowest

WORKER = "workers.hosts"
SIZES = [64 * KIB, MIB, 64 * MIB]
ALGORITHMS = ("auto", "direct", "ring", "hierarchical")
BYTES_PER_BLOCK, MOST_CALLS = 64 * MIB, 20
PORT = 29_600


@dataclass
class Row:
    """The result of one implementation at one size."""

    bytes: int
    who: str
    milliseconds: float  # median of one call, on the slowest rank
    goodput: float  # 10^9 bytes per second that leave each host
    share: float  # fraction of the stream's goodput


def main() -> None:
    options = arguments()
    if lack := missing():
        raise SystemExit(f"this benchmark makes hosts of its own, but {lack}")
    show_machine()
    results, rows = measure(options)
    show(results, rows)
    targets = judge(results, rows)
    show_targets(targets)
    save(options.json, results, targets)


def arguments() -> argparse.Namespace:
    made = parser(__doc__, 3, "blocks of each")
    made.add_argument("--hosts", type=int, default=2, help="how many hosts (2)")
    made.add_argument("--each", type=int, default=2, help="ranks on each (2)")
    made.add_argument("--rate", default="1gbit", help="of each host's link (1gbit), or none")
    made.add_argument("--sizes", type=parse_size, nargs="+", default=SIZES, help="in bytes; 64K and 4M work")
    made.add_argument(
        "--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS, help="sirtaki's (all)"
    )
    made.add_argument("--encrypted", action="store_true", help="also sirtaki with --encrypt")
    made.add_argument("--no-peers", dest="peers", action="store_false", help="neither gloo nor Open MPI")
    return made.parse_args()


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Creates the hosts and measures all implementations in turns."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, Network(options.hosts) as network, ExitStack() as stack:
        if options.rate != "none":
            for host in network.hosts:
                host.limit(options.rate)
        jobs = {who: stack.enter_context(job) for who, job in start(network, options, Path(folder))}
        for size in options.sizes:
            rows += measure_size(jobs, size, options)
    results = {"hosts": options.hosts, "each": options.each, "rate": options.rate}
    versions = {who: next(iter(job.versions.values())) for who, job in jobs.items()}
    return {**results, "versions": versions, "rows": [asdict(row) for row in rows]}, rows


class Contender(Job):
    """A job of one implementation, together with its name."""

    versions: dict[str, str]

    def __enter__(self) -> Contender:
        self.versions = self.ask("versions")[0]
        return self


def start(network: Network, options: argparse.Namespace, folder: Path) -> list[tuple[str, Contender]]:
    """Starts the ranks of all implementations."""
    each = options.each
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    size = len(network.hosts) * each
    contenders = []
    wanted = [name for name in options.algorithms if each > 1 or name != "hierarchical"]
    for number, algorithm in enumerate(wanted):
        launcher = ranks_on(network.hosts, each, key, PORT + number)
        settings = {"SIRTAKI_CPU_ALGORITHM": algorithm}
        who = "sirtaki" if algorithm == "auto" else f"sirtaki, {algorithm}"
        contenders.append((who, Contender(launcher, size, WORKER, "sirtaki", settings=settings)))
    if options.encrypted:
        launcher = ranks_on(network.hosts, each, key, PORT + len(wanted))
        settings = {"SIRTAKI_ENCRYPT": "1"}
        contenders.append(
            ("sirtaki, encrypted", Contender(launcher, size, WORKER, "sirtaki", settings=settings))
        )
    if options.peers:
        gloo = ranks_on(network.hosts, each, key, PORT)
        contenders.append(("gloo", Contender(gloo, size, WORKER, "gloo")))
        if (mpi := mpirun_on(network.hosts, each)) is not None:
            contenders.append(("mpi", Contender(mpi, size, WORKER, "mpi")))
    addresses = {"STREAM_ADDRESSES": ",".join(host.address for host in network.hosts)}
    launcher = ranks_on(network.hosts, 1, key, PORT)
    contenders.append(
        ("stream", Contender(launcher, len(network.hosts), WORKER, "stream", settings=addresses))
    )
    return contenders


def measure_size(jobs: dict[str, Contender], size: int, options: argparse.Namespace) -> list[Row]:
    names = {who: job.ask("prepare", collective="allreduce", size=size)[0][0] for who, job in jobs.items()}
    calls = max(2, min(MOST_CALLS, BYTES_PER_BLOCK // size))
    times: dict[str, list[float]] = {who: [] for who in jobs}
    for _ in range(options.rounds):
        for who, job in jobs.items():
            times[who] += slowest(job.ask("block", who=names[who], calls=calls))
    crossing = 2 * (options.hosts - 1) / options.hosts * size
    stream = size / median(times["stream"]) / 1e3
    rows = []
    for who, measured in times.items():
        goodput = (size if who == "stream" else crossing) / median(measured) / 1e3
        rows.append(Row(size, who, median(measured) / 1e3, goodput, goodput / stream))
    return rows


def show(results: dict[str, Any], rows: list[Row]) -> None:
    for who, version in results["versions"].items():
        print(f"{who}: {version}")
    table: list[list[str]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.bytes != row.bytes:
            table.append([])
        speeds = [f"{row.milliseconds:,.3f}", f"{row.goodput:.4f}", f"{row.share:.2f}"]
        table.append([readable(row.bytes), row.who, *speeds])
    place = f"{results['hosts']} hosts × {results['each']} ranks, links of {results['rate']}"
    head = ["size", "who", "median ms", "goodput GB/s", "of the stream"]
    show_table(f"All-reduce, float32 sum in place, {place}", head, table, text_columns=2)


def judge(results: dict[str, Any], rows: list[Row]) -> list[Target]:
    """Returns the targets for large tensors."""
    place = f"{results['hosts']} hosts × {results['each']}, {results['rate']}"
    largest = {row.who: row for row in rows if row.bytes == max(row.bytes for row in rows)}
    bound = 0.85 if results["rate"] == "none" else 0.9
    size = readable(max(row.bytes for row in rows))
    targets = []
    if "sirtaki" in largest:
        targets += [
            at_least(f"goodput of the stream's, {size}, {place}", bound, largest["sirtaki"].share, "×")
        ]
    if {"sirtaki, hierarchical", "sirtaki, direct"} <= largest.keys():
        faster = largest["sirtaki, direct"].milliseconds / largest["sirtaki, hierarchical"].milliseconds
        targets.append(at_least(f"hierarchical's speed / direct's, {size}, {place}", 1.0, faster))
    return targets


if __name__ == "__main__":
    main()
