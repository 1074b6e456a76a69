"""Simulates jobs of many ranks in virtual time: their start, negotiation, all-reduces, losses, changes.

    python benchmarks/simulate.py [--ranks 8 64 512 4096 16384] [--only negotiation loss] [--json FILE]
    python benchmarks/plot.py FILE          draws docs/pictures/scale.png from what --json has written
    python benchmarks/simulate.py --only direct --tensors 400 --gigabits 10 --rack 0 --message 0

The core's own state machines negotiate, and the core's own schedule of an all-reduce runs, in one process,
without sockets and threads. A rank's work takes as long as the core's code takes on this machine. A host's
cable carries one message at a time in each direction, at --gigabits; --rack hosts share an uplink of as much
as their cables carry, divided by --oversubscription. `direct` compares reports through leaders with reports
that all go to rank 0. The start adds up the messages and handshakes of the rendezvous at the costs that its
code has on this machine.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

from common import native, simulated_start
from common.harness import Benchmark, Results
from common.options import KIB, MIB, Option, choice, number, rounds
from common.report import Columns, Row, Table, make_table, readable

RANKS = [8, 64, 256, 512, 1024, 2048, 4096, 8192, 16384]
SIZES = [4 * KIB, 64 * MIB]
MOST_NAMED = 3  # late ranks


def network(options: Namespace) -> dict[str, int]:
    """Returns the numbers of the drivers that describe hosts, network, and the costs of a message."""
    names = ("each", "latency", "gigabits", "rack", "oversubscription", "message")
    return {name: getattr(options, name) for name in names}


def negotiate(ranks: int, options: Namespace, fan_out: int, **numbers: int) -> Row:
    given = {"ranks": ranks, "fan_out": fan_out, "tensors": options.tensors, "steps": options.rounds}
    found = native.run("negotiation", **given, **network(options), wake=options.message, **numbers)
    late_by = numbers.get("late_by", 0)
    return {"ranks": ranks, "to": "leaders" if fan_out else "rank 0", "late_by": late_by, **found}


def negotiations(options: Namespace) -> list[Row]:
    return [negotiate(ranks, options, options.fan_out) for ranks in options.ranks]


def direct(options: Namespace) -> list[Row]:
    few = [ranks for ranks in options.ranks if ranks <= native.MOST_WITH_LINKS]
    return [negotiate(ranks, options, fan_out) for ranks in few for fan_out in (options.fan_out, 0)]


def stragglers(options: Namespace) -> list[Row]:
    """Negotiates with ranks that submit late, in steps so far apart that each one's lateness is published."""
    few = [ranks for ranks in options.ranks if ranks <= options.most_late]
    return [
        negotiate(ranks, options, options.fan_out, late=options.late, late_by=late_by, pause=600_000)
        for late_by in options.late_by
        for ranks in few
    ]


def lose(ranks: int, host: bool, options: Namespace) -> Row:
    """Simulates the loss of a leader's process, or of all processes of its host."""
    found = native.run("lost_rank", ranks=ranks, host=int(host), wake=options.message, **network(options))
    return {"ranks": ranks, "host": host, **found}


def worlds(options: Namespace) -> list[int]:
    """Returns the numbers of ranks whose loss can be simulated: those that fill at least four hosts."""
    return [ranks for ranks in options.ranks if 4 * options.each <= ranks <= native.MOST_WITH_LINKS]


def losses(options: Namespace) -> list[Row]:
    return [lose(ranks, host, options) for host in (False, True) for ranks in worlds(options)]


def allreduces(options: Namespace) -> list[Row]:
    return [
        {"ranks": ranks, "size": size}
        | native.run("allreduce", ranks=ranks, bytes=size, memory=options.memory, **network(options))
        for size in SIZES
        for ranks in options.ranks
    ]


def changes(options: Namespace) -> list[Row]:
    """Simulates elastic changes, in which a host is lost."""
    noticed = {ranks: lose(ranks, True, options)["last"] * 1e-6 for ranks in worlds(options)}
    return simulated_start.simulate_changes(noticed, options)


def milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.2f}"


def amount(count: int) -> str:
    """Formats a number of bytes, with one digit after the decimal point."""
    unit, divisor = ("MiB", MIB) if count >= MIB else ("KiB", KIB)
    return f"{count / divisor:,.1f} {unit}"


def describe_late(row: Row) -> str:
    """Lists the ranks that others waited for longest, with the longest of these times."""
    ordered = sorted(row["lateness"], key=lambda late: -late[2])[:MOST_NAMED]
    return ", ".join(f"rank {rank:.0f} ({milliseconds(longest)} ms)" for rank, _, longest in ordered)


NEGOTIATION: Columns = {
    "ranks": "{ranks:,}",
    "report to": "{to}",
    "latency, ms": lambda row: milliseconds(row["steady"]["latency"]),
    "first step": lambda row: milliseconds(row["first"]["latency"]),
    "rank 0: busy, ms": lambda row: milliseconds(row["steady"]["processor"]),
    "frames in": "{steady[frames_in]:,.0f}",
    "bytes in": lambda row: amount(row["steady"]["bytes_in"]),
    "of the first step": lambda row: amount(row["first"]["bytes_in"]),
    "bytes out": lambda row: amount(row["steady"]["bytes_out"]),
    "frames of all": "{steady[frames_of_all]:,.0f}",
    "bytes of all": lambda row: amount(row["steady"]["bytes_of_all"]),
}
LATE: Columns = {
    "ranks": "{ranks:,}",
    "last submission, ms": lambda row: milliseconds(row["late_by"]),
    "latency from there": lambda row: milliseconds(row["steady"]["latency"]),
    "frames in": "{steady[frames_in]:,.0f}",
    "bytes in": lambda row: amount(row["steady"]["bytes_in"]),
    "named late": describe_late,
}
LOSSES: Columns = {
    "ranks": "{ranks:,}",
    "lost": lambda row: "host" if row["host"] else "process",
    "first knows, ms": lambda row: milliseconds(row["first"]),
    "last knows": lambda row: milliseconds(row["last"]),
    "send aborts": "{announced:,}",
    "frames": "{frames:,}",
    "bytes": lambda row: amount(row["bytes"]),
}
ALLREDUCES: Columns = {
    "ranks": "{ranks:,}",
    "size": lambda row: readable(row["size"]),
    "algorithm": "{algorithm}",
    "time, ms": lambda row: milliseconds(row["microseconds"]),
    "frames of a host": "{frames:,}",
    "bytes of a host": lambda row: amount(row["bytes"]),
    "bytes a frame": lambda row: f"{row['bytes'] / row['frames']:,.0f}" if row["frames"] else "",
}
# Each section with its title, columns and measurement.
SECTIONS: dict[str, tuple[str, Columns, Callable[[Namespace], Sequence[Row]]]] = {
    "negotiation": ("Negotiation", NEGOTIATION, negotiations),
    "direct": ("Negotiation with and without leaders", NEGOTIATION, direct),
    "stragglers": ("Late ranks", LATE, stragglers),
    "loss": ("A lost leader", LOSSES, losses),
    "allreduce": ("All-reduce", ALLREDUCES, allreduces),
    "start": ("init()", simulated_start.STARTS, simulated_start.simulate_all),
    "change": ("A host of an elastic job ends", simulated_start.CHANGES, changes),
}


def measure(options: Namespace) -> Results:
    title = (
        f"{options.each} ranks a host, {options.latency} µs and {options.gigabits} Gbit/s between hosts, "
        f"{options.rack} hosts a rack, oversubscription {options.oversubscription}"
    )
    found = {name: simulate(options) for name, (_, _, simulate) in SECTIONS.items() if name in options.only}
    return {"network": title, "tensors": options.tensors, **found}


def tables(results: Results) -> Iterator[Table | str]:
    yield f"{results['tensors']} tensors a step, {results['network']}"
    for name, (title, columns, _) in SECTIONS.items():
        if results.get(name):
            yield make_table(title, columns, results[name])


OPTIONS = [
    rounds(3, "steps after the first one"),
    Option("--ranks", type=int, nargs="+", default=RANKS, help="how many (8 to 16384)"),
    choice("--only", list(SECTIONS), "some sections only"),
    number("--each", 8, "ranks on each host"),
    number("--fan-out", 16, "hosts that a leader reports for directly"),
    number("--tensors", 100, "in each step"),
    number("--latency", 30, "between two hosts, microseconds"),
    number("--gigabits", 100, "a second, of each host's cable"),
    number("--rack", 16, "hosts that share an uplink; 0: all hosts have one switch"),
    number("--oversubscription", 2, "of the uplinks"),
    number("--message", 2000, "nanoseconds of a processor for each end of a message"),
    number("--memory", 50_000, "megabytes per second that a host copies through shared memory"),
    number("--late", 3, "ranks that submit late"),
    Option("--late-by", type=int, nargs="+", default=[5000, 50_000], help="microseconds (5000 50000)"),
    number("--most-late", 4096, "ranks in worlds with late ranks"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables)

if __name__ == "__main__":
    BENCHMARK.main()
