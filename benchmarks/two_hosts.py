"""Compares all-reduce between two hosts, with only the kernel between them, with a plain stream.

    python benchmarks/two_hosts.py [--sizes 1K 64K 1M 16M 64M] [--set sockets_per_link=2 ...] [--json FILE]

Two processes are configured as ranks of two hosts, and are connected by TCP over loopback. The stream is as
simple as possible: the tensor's bytes in both directions at once, with one thread per direction. All-reduce
and stream take turns in blocks of calls. The share is the stream's time divided by sirtaki's, the median of
adjacent blocks; the JSON file holds the bounds of its 95 % interval.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from common import native
from common.harness import Benchmark, Results
from common.measure import Interval, median_interval
from common.options import KIB, MIB, Option, sizes
from common.report import Target, at_least, readable, show_rows

SIZES = [KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
LARGE = 64 * MIB


@dataclass
class Row:
    """The results of one size; times of a call in microseconds, medians."""

    bytes: int
    sirtaki: float
    stream: float
    share: Interval


COLUMNS = [
    ("size", lambda row: readable(row.bytes)),
    ("sirtaki µs", lambda row: f"{row.sirtaki:,.1f}"),
    ("stream µs", lambda row: f"{row.stream:,.1f}"),
    ("of the stream", lambda row: f"{row.share.median:.2f}"),
]


def measure(options: Namespace) -> Results:
    rows = [
        Row(found["bytes"], found["sirtaki_us"], found["stream_us"], median_interval(found["ratios"]))
        for found in native.run("two_hosts", *options.set, *options.sizes)
    ]
    return {"rows": rows}


def show(results: Results) -> None:
    show_rows("All-reduce, float32 sum in place, 2 hosts over loopback", COLUMNS, results["rows"])


def judge(results: Results) -> list[Target]:
    """Returns the target for large tensors."""
    what = f"speed of the stream's, {readable(LARGE)}, over loopback"
    return [at_least(what, 0.85, row.share.median) for row in results["rows"] if row.bytes == LARGE]


SETTINGS = Option("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of sirtaki")
BENCHMARK = Benchmark(__doc__, [sizes(SIZES), SETTINGS], measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
