"""Worlds of many ranks in virtual time: their negotiation, late ranks, lost leaders, and all-reduces."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from negotiation import Step, amount

from common import native
from common.report import readable, show_rows

MOST_WITH_LINKS = 4096  # ranks of which each has the tables of its links in memory
MOST_WITH_EVENTS = 256  # ranks whose all-reduce is simulated frame by frame


@dataclass
class Negotiation:
    """The negotiation of a step. Times in microseconds."""

    ranks: int
    first: Step
    steady: Step
    late: list[list[float]]  # rank, times that it was last, longest delay of the others
    late_by: int = 0  # of the last rank


@dataclass
class Loss:
    """The loss of a leader's process, or of all processes of its host. Times in microseconds."""

    ranks: int
    host: bool
    announced: int  # ranks that have sent the abort to all others
    first: float
    last: float
    frames: int
    bytes: int


@dataclass
class Allreduce:
    """An all-reduce. Frames and bytes leave one host."""

    ranks: int
    size: int
    algorithm: str
    microseconds: float
    frames: int
    bytes: int
    events: float | None = None  # microseconds when simulated frame by frame


def network(options: Namespace) -> dict[str, int]:
    """Returns the numbers of the drivers that describe hosts and network."""
    return {
        "each": options.each,
        "latency": options.latency,
        "gigabits": options.gigabits,
        "rack": options.rack,
        "oversubscription": options.oversubscription,
        "processors": options.cores,
    }


def run(driver: str, **numbers: int) -> dict[str, Any]:
    """Runs a driver with these numbers; returns the JSON object that it prints."""
    (result,) = native.run(driver, *(f"{name}={value}" for name, value in numbers.items()))
    return result


def processor_costs(options: Namespace) -> dict[str, int]:
    """Returns the costs of a message for its sender, and for a receiver that it wakes up."""
    return {"message": options.message, "wake": options.message}


def negotiate(ranks: int, options: Namespace, **numbers: int) -> Negotiation:
    found = run(
        "negotiation",
        ranks=ranks,
        fan_out=options.fan_out,
        tensors=options.tensors,
        steps=options.rounds,
        **network(options),
        **processor_costs(options),
        **numbers,
    )
    steps = Step(**found["first"]), Step(**found["steady"])
    return Negotiation(ranks, *steps, found["lateness"], numbers.get("late_by", 0))


def straggle(ranks: int, late_by: int, options: Namespace) -> Negotiation:
    """Negotiates with ranks that submit late, in steps so far apart that each one's lateness is published."""
    return negotiate(ranks, options, late=options.late, late_by=late_by, pause=600_000)


def lose(ranks: int, host: bool, options: Namespace) -> Loss:
    costs = {**network(options), **processor_costs(options)}
    return Loss(ranks, host, **run("lost_rank", ranks=ranks, host=int(host), **costs))


def allreduce(ranks: int, size: int, options: Namespace) -> Allreduce:
    numbers = {"ranks": ranks, "bytes": size, "message": options.message, "memory": options.memory}
    found = run("allreduce", **numbers, **network(options))
    row = Allreduce(ranks, size, **found)
    if options.each < ranks <= MOST_WITH_EVENTS:
        row.events = run("allreduce", **numbers, **network(options), events=1)["microseconds"]
    return row


def worlds(rank_counts: Sequence[int], options: Namespace, hosts: int = 1) -> list[int]:
    """Returns the numbers of ranks that fill this many hosts at least."""
    return [ranks for ranks in rank_counts if ranks >= hosts * options.each]


def milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.2f}"


Columns = Sequence[tuple[str, Callable[[Any], str]]]
NEGOTIATION: Columns = [
    ("ranks", lambda row: f"{row.ranks:,}"),
    ("latency, ms", lambda row: milliseconds(row.steady.latency)),
    ("first step", lambda row: milliseconds(row.first.latency)),
    ("rank 0: busy, ms", lambda row: milliseconds(row.steady.processor)),
    ("frames in", lambda row: f"{row.steady.frames_in:,}"),
    ("bytes in", lambda row: amount(row.steady.bytes_in)),
    ("bytes out", lambda row: amount(row.steady.bytes_out)),
    ("frames of all", lambda row: f"{row.steady.frames_of_all:,}"),
    ("bytes of all", lambda row: amount(row.steady.bytes_of_all)),
]
LATE: Columns = [
    ("ranks", lambda row: f"{row.ranks:,}"),
    ("last submission, ms", lambda row: milliseconds(row.late_by)),
    ("latency from there", lambda row: milliseconds(row.steady.latency)),
    ("frames in", lambda row: f"{row.steady.frames_in:,}"),
    ("bytes in", lambda row: amount(row.steady.bytes_in)),
    ("named late", lambda row: describe_late(row.late)),
]
LOSSES: Columns = [
    ("ranks", lambda row: f"{row.ranks:,}"),
    ("lost", lambda row: "host" if row.host else "process"),
    ("first knows, ms", lambda row: milliseconds(row.first) if row.last else ""),
    ("last knows", lambda row: milliseconds(row.last) if row.last else ""),
    ("send aborts", lambda row: f"{row.announced:,}"),
    ("frames", lambda row: f"{row.frames:,}"),
    ("bytes", lambda row: amount(row.bytes)),
]
ALLREDUCES: Columns = [
    ("ranks", lambda row: f"{row.ranks:,}"),
    ("size", lambda row: readable(row.size)),
    ("algorithm", lambda row: row.algorithm),
    ("time, ms", lambda row: milliseconds(row.microseconds)),
    ("frame by frame", lambda row: milliseconds(row.events) if row.events else ""),
    ("frames of a host", lambda row: f"{row.frames:,}"),
    ("bytes of a host", lambda row: amount(row.bytes)),
    ("bytes a frame", lambda row: f"{row.bytes / row.frames:,.0f}" if row.frames else ""),
]


def describe_late(late: Sequence[Sequence[float]], most: int = 3) -> str:
    """Lists the ranks that others waited for longest, with the longest of these times."""
    ordered = sorted(late, key=lambda one: -one[2])[:most]
    return ", ".join(f"rank {rank:.0f} ({milliseconds(longest)} ms)" for rank, _, longest in ordered)


def show(title: str, columns: Columns, rows: Sequence[Any]) -> None:
    if rows:
        show_rows(title, columns, rows)
