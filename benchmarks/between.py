"""Compares all-reduce between two hosts, with only the kernel between them, with a plain stream.

    python benchmarks/between.py [--sizes 1K 64K 1M 16M 64M] [--set sockets_per_link=2 ...] [--json FILE]

Two processes are configured as ranks of two hosts, and are connected by TCP over loopback. The stream is as
simple as possible: the tensor's bytes in both directions at once, with one thread per direction. All-reduce
and stream take turns in blocks of calls. The share is the stream's time divided by sirtaki's, the median of
adjacent blocks; the JSON file holds the bounds of its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import native
from common.measure import Interval, median_interval
from common.options import KIB, MIB, add_json, parse_size
from common.report import Target, at_least, readable, save, show_machine, show_table, show_targets

SIZES = [KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
LARGE = 64 * MIB
SECONDS = 600


@dataclass
class Row:
    """The results of one size; times of a call in microseconds, medians."""

    bytes: int
    sirtaki: float
    stream: float
    share: Interval


def main() -> None:
    options = arguments()
    show_machine()
    rows = measure(options.sizes, options.set)
    show(rows)
    targets = judge(rows)
    show_targets(targets)
    save(options.json, {"rows": [asdict(row) for row in rows]}, targets)


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--sizes", type=parse_size, nargs="+", default=SIZES, help="in bytes; 64K and 4M work")
    made.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of sirtaki")
    add_json(made)
    return made.parse_args()


def measure(sizes: list[int], settings: list[str]) -> list[Row]:
    """Measures all-reduce and the stream in turns."""
    command: list[str | Path] = [native.build() / "between", *settings, *map(str, sizes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    return [make_row(json.loads(line)) for line in done.stdout.splitlines()]


def make_row(measured: dict[str, Any]) -> Row:
    share = median_interval(measured["ratios"])
    return Row(measured["bytes"], measured["sirtaki_us"], measured["stream_us"], share)


def show(rows: list[Row]) -> None:
    table = [
        [readable(row.bytes), f"{row.sirtaki:,.1f}", f"{row.stream:,.1f}", f"{row.share.median:.2f}"]
        for row in rows
    ]
    head = ["size", "sirtaki µs", "stream µs", "of the stream"]
    show_table("All-reduce, float32 sum in place, 2 hosts over loopback", head, table)


def judge(rows: list[Row]) -> list[Target]:
    """Returns the target for large tensors."""
    what = f"speed of the stream's, {readable(LARGE)}, over loopback"
    return [at_least(what, 0.85, row.share.median) for row in rows if row.bytes == LARGE]


if __name__ == "__main__":
    main()
