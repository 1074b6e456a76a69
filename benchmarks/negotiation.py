"""Measures negotiation among many ranks, in virtual time: through leaders, and directly with rank 0.

    python benchmarks/negotiation.py [--ranks 8 64 512 4096] [--each 8] [--fan-out 16] [--json FILE]

The core's own negotiation runs for every rank in one process, without sockets and threads. All ranks submit
the tensors of a training step at the same moment; the measured latency ends when the last rank has the
Decision. The first step sends full requests, later steps send numbers of the response cache. A host's link
carries one message at a time in each direction, at --gigabits, and the latency between two hosts is --latency
microseconds; a message inside a host takes 2 microseconds. A rank's work takes as long as the core's code
takes on this machine, on a processor of the rank's own; system calls cost nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from common import native
from common.options import KIB, MIB, parser
from common.report import save, show_machine, show_table

RANKS = [8, 64, 512, 4096]
LEADERS, STRAIGHT = "leaders", "rank 0"
AT_RANK_0 = ["frames in", "out", "bytes in", "out"]
SECONDS = 600


@dataclass
class Step:
    """The cost of one step. Times in microseconds; frames and bytes of rank 0 and of all ranks."""

    latency: float  # from the submission to the Decision at the last rank
    processor: float  # of rank 0
    frames_in: int
    bytes_in: int
    frames_out: int
    bytes_out: int
    frames_of_all: int
    bytes_of_all: int


@dataclass
class Row:
    """One world, and the peers to which its ranks report."""

    ranks: int
    to: str
    first: Step
    steady: Step


def main() -> None:
    options = arguments()
    show_machine()
    rows = measure(options)
    show(options, rows)
    save(options.json, {"rows": [asdict(row) for row in rows]}, [])


def arguments() -> argparse.Namespace:
    made = parser(__doc__, 5, "steps after the first one")
    made.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="how many (8 64 512 4096)")
    made.add_argument("--each", type=int, default=8, help="ranks on each host (8)")
    made.add_argument("--fan-out", type=int, default=16, help="hosts that a leader reports for directly (16)")
    made.add_argument("--tensors", type=int, default=400, help="in each step (400)")
    made.add_argument("--latency", type=int, default=30, help="between two hosts, microseconds (30)")
    made.add_argument("--gigabits", type=int, default=10, help="a second, of each host's cable (10)")
    return made.parse_args()


def measure(options: argparse.Namespace) -> list[Row]:
    """Negotiates in every world, through leaders and without them."""
    program = native.build() / "negotiation"
    return [negotiate(program, ranks, to, options) for ranks in options.ranks for to in (LEADERS, STRAIGHT)]


def negotiate(program: Path, ranks: int, to: str, options: argparse.Namespace) -> Row:
    """Returns the driver's results for one world. Fails unless all ranks receive the same plans."""
    settings = {
        "ranks": ranks,
        "each": options.each,
        "fan_out": options.fan_out if to == LEADERS else 0,
        "tensors": options.tensors,
        "latency": options.latency,
        "gigabits": options.gigabits,
        "steps": options.rounds,
    }
    command = [program, *(f"{name}={value}" for name, value in settings.items())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    steps = {name: Step(**step) for name, step in json.loads(done.stdout).items()}
    return Row(ranks, to, **steps)


def show(options: argparse.Namespace, rows: list[Row]) -> None:
    for title, name in (("in steady state", "steady"), ("in the first step", "first")):
        table: list[list[str]] = []
        for before, row in zip([None, *rows], rows, strict=False):
            if before is not None and before.ranks != row.ranks:
                table.append([])
            table.append([f"{row.ranks:,}", row.to, *cells(getattr(row, name))])
        head = ["ranks", "report to", "latency µs", "rank 0: busy µs", *AT_RANK_0, "bytes of all"]
        between = f"{options.latency} µs and {options.gigabits} Gbit/s between hosts"
        show_table(
            f"{options.tensors} tensors {title}, {options.each} ranks a host, {between}",
            head,
            table,
            text_columns=2,
        )


def cells(step: Step) -> list[str]:
    times = [f"{step.latency:,.0f}", f"{step.processor:,.0f}", f"{step.frames_in:,}", f"{step.frames_out:,}"]
    return [*times, amount(step.bytes_in), amount(step.bytes_out), amount(step.bytes_of_all)]


def amount(count: int) -> str:
    """Formats a number of bytes, with one digit after the decimal point."""
    unit, divisor = ("MiB", MIB) if count >= MIB else ("KiB", KIB)
    return f"{count / divisor:,.1f} {unit}"


if __name__ == "__main__":
    main()
