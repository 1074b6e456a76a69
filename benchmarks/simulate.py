"""Simulates jobs of many ranks in virtual time: their start, negotiation, all-reduces, losses, changes.

    python benchmarks/simulate.py [--ranks 8 64 512 4096 16384] [--only negotiation check] [--json FILE]
    python benchmarks/plot.py FILE          draws docs/pictures/scale.png from what --json has written

The core's own state machines negotiate, and the core's own schedule of an all-reduce runs, in one process,
without sockets and threads. A host's cable carries one message at a time in each direction, at --gigabits;
--rack hosts share an uplink of as much as their cables carry, divided by --oversubscription. The start adds
up the messages and handshakes of the rendezvous at the costs that its code has on this machine. `check`
compares 4 to 256 real processes on this machine with as many simulated ranks, which share its processors,
at costs that worlds of half the size have there.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from common import checked, simulated, simulated_change, simulated_start
from common.harness import Benchmark, Results
from common.options import KIB, MIB, Option, choice, number, rounds
from common.report import Target, at_most

RANKS = [8, 64, 256, 512, 1024, 2048, 4096, 8192, 16384]
SIZES = [4 * KIB, 64 * MIB]
MOST_RATIO = 1.5


def negotiations(options: Namespace) -> list[simulated.Negotiation]:
    return [simulated.negotiate(ranks, options) for ranks in options.ranks]


def stragglers(options: Namespace) -> list[simulated.Negotiation]:
    few = [ranks for ranks in options.ranks if ranks <= options.most_late]
    return [simulated.straggle(ranks, late_by, options) for late_by in options.late_by for ranks in few]


def losses(options: Namespace) -> list[simulated.Loss]:
    ranks = [one for one in options.ranks if one <= simulated.MOST_WITH_LINKS]
    wide = simulated.worlds(ranks, options, hosts=4)
    return [simulated.lose(ranks, host, options) for host in (False, True) for ranks in wide]


def allreduces(options: Namespace) -> list[simulated.Allreduce]:
    return [simulated.allreduce(ranks, size, options) for size in SIZES for ranks in options.ranks]


def starts(options: Namespace) -> list[simulated_start.Start]:
    return simulated_start.simulate_all(options)


def changes(options: Namespace) -> list[simulated_change.Change]:
    return simulated_change.simulate_all(options)


SECTIONS: dict[str, Callable[[Namespace], list[Any]]] = {
    "negotiation": negotiations,
    "stragglers": stragglers,
    "loss": losses,
    "allreduce": allreduces,
    "start": starts,
    "change": changes,
    "check": checked.check_all,
}


def measure(options: Namespace) -> Results:
    title = (
        f"{options.each} ranks a host, {options.latency} µs and {options.gigabits} Gbit/s between hosts, "
        f"{options.rack} hosts a rack, oversubscription {options.oversubscription}"
    )
    found = {name: section(options) for name, section in SECTIONS.items() if name in options.only}
    return {"network": title, "tensors": options.tensors, "late": options.late, **found}


def show(results: Results) -> None:
    network, tensors, late = results["network"], results["tensors"], results["late"]
    simulated.show(f"{tensors} tensors, {network}", simulated.NEGOTIATION, results.get("negotiation", []))
    simulated.show(f"{late} late ranks", simulated.LATE, results.get("stragglers", []))
    simulated.show("A lost leader", simulated.LOSSES, results.get("loss", []))
    simulated.show("All-reduce", simulated.ALLREDUCES, results.get("allreduce", []))
    simulated.show("init()", simulated_start.STARTS, results.get("start", []))
    simulated.show("A host of an elastic job ends", simulated_change.CHANGES, results.get("change", []))
    simulated.show("Real processes and simulated ranks", checked.CHECKS, results.get("check", []))


def judge(results: Results) -> list[Target]:
    worst = [max(row.ratio, 1 / row.ratio) for row in results.get("check", [])]
    return [at_most("real and simulated times differ", MOST_RATIO, max(worst), "×")] if worst else []


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
    number("--cores", 0, "processors that all ranks share; 0: each rank has its own"),
    number("--message", 2000, "nanoseconds of a processor for each end of a message, but for check"),
    number("--memory", 50_000, "megabytes per second that a host copies through shared memory"),
    number("--late", 3, "ranks that submit late"),
    Option("--late-by", type=int, nargs="+", default=[5000, 50_000], help="microseconds (5000 50000)"),
    number("--most-late", 4096, "ranks in worlds with late ranks"),
    Option(
        "--processes",
        type=int,
        nargs="+",
        default=[4, 8, 16, 32, 64, 128, 256],
        help="real ranks of the check (4 to 256)",
    ),
    number("--beside", 2, "worlds side by side, by which the costs of a world of the check are measured"),
    number("--usable", len(os.sched_getaffinity(0)), "processors that the real ranks share"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, show, judge)

if __name__ == "__main__":
    BENCHMARK.main()
