"""All-reduce between two hosts with only the kernel between them, beside what a plain stream carries.

    python benchmarks/between.py [--sizes 1K 64K 1M 16M 64M] [--set sockets_per_link=2 ...] [--json FILE]

Two processes are told to live on two hosts, and are linked by TCP over loopback. The stream is as plain as
can be: the tensor's bytes both ways at once, a thread a direction. They take turns in blocks of calls; the
share is the stream's time over sirtaki's, the median of neighbouring blocks, with the bounds of its 95 %
interval in the JSON file.
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
    """One size; times of a call in microseconds, medians."""

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
    """Lets the two take turns."""
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
    """The target for large tensors."""
    what = f"speed of the stream's, {readable(LARGE)}, over loopback"
    return [at_least(what, 0.85, row.share.median) for row in rows if row.bytes == LARGE]


if __name__ == "__main__":
    main()
