"""Compares plain streams between two hosts, sent as usual and with MSG_ZEROCOPY.

    sudo python benchmarks/zero_copy.py [--connections 1 2 4] [--rate none] [--rounds 7] [--json FILE]

The hosts are network namespaces on a bridge. Both ways take turns, over the same number of connections with a
thread each. "copied" is the share of the kernel's notifications that say that it has copied the bytes after
all. "calls" costs what io_uring could save at most: the calls of both sides, times the shortest time of one.
"""

from __future__ import annotations

import json
import sys
import timeit
from argparse import Namespace
from dataclasses import dataclass
from os import getppid
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from common.harness import Benchmark, Results
from common.measure import Interval, median_interval
from common.options import MIB, Option, number, rounds
from common.over_hosts import hosts_of
from common.report import show_rows

if TYPE_CHECKING:
    from network import Host

WORKER = Path(__file__).parent / "workers" / "zero_copy.py"
PORT = 45123
WAYS = ("plain", "zero copy")


@dataclass
class Row:
    """The result of one number of connections. Rates in GB/s, processor time in seconds per GB."""

    connections: int
    plain: float
    zero_copy: float
    ratio: Interval  # of the rates, pair by pair
    plain_processor: float
    zero_copy_processor: float
    copied: float  # share of the notifications
    calls: float  # share of the plain stream's time


COLUMNS = [
    ("connections", lambda row: f"{row.connections}"),
    ("plain GB/s", lambda row: f"{row.plain:.2f}"),
    ("zero copy GB/s", lambda row: f"{row.zero_copy:.2f}"),
    ("ratio", lambda row: f"{row.ratio.median:.2f}"),
    ("processor, s/GB", lambda row: f"{row.plain_processor:.2f}"),
    ("with zero copy", lambda row: f"{row.zero_copy_processor:.2f}"),
    ("copied", lambda row: f"{row.copied:.0%}"),
    ("calls", lambda row: f"{row.calls:.1%}"),
]


def measure(options: Namespace) -> Results:
    with hosts_of(Namespace(hosts=2, rate=options.rate)) as (hosts, _):
        rows = [compare(hosts[0], hosts[1], count, options) for count in options.connections]
    return {"rate": options.rate, "rows": rows}


def compare(sender: Host, receiver: Host, connections: int, options: Namespace) -> Row:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for round_ in range(options.rounds + 1):
        for way in WAYS:
            result = stream(sender, receiver, connections, options.megabytes, way)
            if round_:  # the first round warms up
                found[way].append(result)
    plain, zero_copy = ([one["rate"] for one in found[way]] for way in WAYS)
    ratios = [other / usual for other, usual in zip(zero_copy, plain, strict=True)]
    processor = [median(one["processor"] for one in found[way]) for way in WAYS]
    notices = sum(one["notices"] for one in found["zero copy"])
    call = min(timeit.repeat(getppid, number=10_000, repeat=5)) / 10_000
    return Row(
        connections,
        median(plain),
        median(zero_copy),
        median_interval(ratios),
        *processor,
        sum(one["copied"] for one in found["zero copy"]) / max(notices, 1),
        median(one["calls"] * call / one["seconds"] for one in found["plain"]),
    )


def stream(sender: Host, receiver: Host, connections: int, megabytes: int, way: str) -> dict[str, Any]:
    """Sends this much over the connections together; returns rate, seconds, processor time and calls."""
    each = str(megabytes * MIB // connections)
    with receiver.start(sys.executable, WORKER, "receive", f"{PORT}", f"{connections}") as receiving:
        assert receiving.stdout is not None
        receiving.stdout.readline()  # it listens
        words = [sys.executable, WORKER, "send", f"{receiver.address}:{PORT}", f"{connections}", each, way]
        code, out, errors = sender.run(*words)
        if code:
            receiving.kill()
            raise SystemExit(f"the sender failed: {errors}")
        (last,) = receiving.stdout.readlines()
    sent, received = json.loads(out), json.loads(last)
    gigabytes = received["bytes"] / 1e9
    return {
        "rate": gigabytes / received["seconds"],
        "seconds": received["seconds"],
        "processor": (sent["processor"] + received["processor"]) / gigabytes,
        "calls": (sent["calls"] + received["calls"]) / connections,
        "notices": sent["notices"],
        "copied": sent["copied"],
    }


def show(results: Results) -> None:
    show_rows(f"Plain streams between two hosts, links: {results['rate']}", COLUMNS, results["rows"])


OPTIONS = [
    rounds(7, "blocks of each way"),
    Option("--connections", type=int, nargs="+", default=[1, 2, 4], help="at the same time (1 2 4)"),
    number("--megabytes", 1024, "MiB sent in a block"),
    Option("--rate", default="none", help="of each host's link (1gbit), or none"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show)

if __name__ == "__main__":
    BENCHMARK.main()
