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

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from common import native
from common.harness import Benchmark, Results
from common.options import KIB, MIB, Option, number, rounds
from common.report import show_rows

RANKS = [8, 64, 512, 4096]
LEADERS, STRAIGHT = "leaders", "rank 0"


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


def columns(step: Callable[[Row], Step]) -> list[tuple[str, Callable[[Row], str]]]:
    """Returns the columns of the table about one of a row's steps."""
    return [
        ("ranks", lambda row: f"{row.ranks:,}"),
        ("report to", lambda row: row.to),
        ("latency µs", lambda row: f"{step(row).latency:,.0f}"),
        ("rank 0: busy µs", lambda row: f"{step(row).processor:,.0f}"),
        ("frames in", lambda row: f"{step(row).frames_in:,}"),
        ("out", lambda row: f"{step(row).frames_out:,}"),
        ("bytes in", lambda row: amount(step(row).bytes_in)),
        ("out", lambda row: amount(step(row).bytes_out)),
        ("bytes of all", lambda row: amount(step(row).bytes_of_all)),
    ]


def amount(count: int) -> str:
    """Formats a number of bytes, with one digit after the decimal point."""
    unit, divisor = ("MiB", MIB) if count >= MIB else ("KiB", KIB)
    return f"{count / divisor:,.1f} {unit}"


def measure(options: Namespace) -> Results:
    """Negotiates in every world, through leaders and without them."""
    rows = [negotiate(ranks, to, options) for ranks in options.ranks for to in (LEADERS, STRAIGHT)]
    title = f"{options.each} ranks a host, {options.latency} µs and {options.gigabits} Gbit/s between hosts"
    return {"tensors": options.tensors, "network": title, "rows": rows}


def negotiate(ranks: int, to: str, options: Namespace) -> Row:
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
    (found,) = native.run("negotiation", *(f"{name}={value}" for name, value in settings.items()))
    return Row(ranks, to, Step(**found["first"]), Step(**found["steady"]))


def show(results: Results) -> None:
    tensors, network, rows = results["tensors"], results["network"], results["rows"]
    steps = {"in steady state": lambda row: row.steady, "in the first step": lambda row: row.first}
    for when, step in steps.items():
        title = f"{tensors} tensors {when}, {network}"
        show_rows(title, columns(step), rows, text_columns=2, group=lambda row: row.ranks)


OPTIONS = [
    rounds(5, "steps after the first one"),
    Option("--ranks", type=int, nargs="+", default=RANKS, help="how many (8 64 512 4096)"),
    number("--each", 8, "ranks on each host"),
    number("--fan-out", 16, "hosts that a leader reports for directly"),
    number("--tensors", 400, "in each step"),
    number("--latency", 30, "between two hosts, microseconds"),
    number("--gigabits", 10, "a second, of each host's cable"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show)

if __name__ == "__main__":
    BENCHMARK.main()
