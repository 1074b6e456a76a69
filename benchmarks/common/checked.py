"""Real processes on this machine beside as many simulated ranks, which share its processors.

The simulation is given the cost of a message between two processes (`calibrate`), for each all-reduce the
speed of memory for as many ranks (`memory_speed`), and what the code around the state machines costs in
small worlds: for a step and for each of its operations, with two ranks for each processor; for a start, with
two ranks. The larger worlds are the check.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import scale

from common import native, simulated_start
from common.simulated import milliseconds, run

OPERATIONS = (1, 100)  # barriers of a step: negotiation without data
SIZES = (1 << 20, 16 << 20)
MOST_WITH_DATA = 64  # ranks of an all-reduce: each has a connection to each other one
MOST_STARTED = 64  # ranks of init()
STEPS, STEPS_OF_FEW = 51, 101  # of several hosts, and of one
STARTS, STARTS_OF_TWO = 5, 9
EACH = 2  # ranks a processor, by which the costs of a step are measured
TWO = 2  # ranks, by which the cost of a start is measured
FAST = {"latency": 0, "gigabits": 1000}  # loopback: the processors limit it


@dataclass
class Check:
    """A measured and a simulated time, in microseconds."""

    what: str
    ranks: int
    real: float
    simulated: float

    @property
    def ratio(self) -> float:
        return self.simulated / self.real


CHECKS: Sequence[tuple[str, Callable[[Any], str]]] = [
    ("what", lambda row: row.what),
    ("ranks", lambda row: f"{row.ranks}"),
    ("real, ms", lambda row: milliseconds(row.real)),
    ("simulated, ms", lambda row: milliseconds(row.simulated)),
    ("simulated / real", lambda row: f"{row.ratio:.2f}"),
]


@dataclass(frozen=True)
class Machine:
    """Costs of this machine: ns of a message; MB/s of a stream; ns of a look by a rank that waits; ns of a
    processor for a step, and for an operation in it.
    """

    message: int
    stream: int
    look: int
    begin: int = 0
    submit: int = 0

    def costs(self, options: Namespace) -> dict[str, int]:
        """Returns the numbers of the drivers. A message costs its sender and its receiver half each."""
        half = self.message // 2
        return {"message": half, "processors": options.usable, "each": options.each, **FAST}


def calibrate(options: Namespace) -> Machine:
    (found,) = native.run("calibrate")
    machine = Machine(**found)
    ranks = EACH * options.usable

    def of_a_rank(barriers: int) -> float:
        """Returns the nanoseconds of a processor that are unexplained."""
        real = _real(ranks, options.each, barriers=barriers)
        return 1e3 * (real - _negotiation(ranks, barriers, machine, options)) / EACH

    few, many = map(of_a_rank, OPERATIONS)
    submit = max((many - few) / (OPERATIONS[1] - OPERATIONS[0]), 0)
    return replace(machine, begin=round(max(few - submit, 0)), submit=round(submit))


def _real(ranks: int, each: int, **work: int) -> float:
    """Returns the microseconds of the shortest step of real processes: the least disturbed one."""
    steps = STEPS_OF_FEW if ranks <= each else STEPS
    return float(min(run("many_ranks", ranks=ranks, each=each, steps=steps, **work)["steady"]))


def check_all(options: Namespace) -> list[Check]:
    machine = calibrate(options)
    rows = [
        _check_negotiation(ranks, count, machine, options)
        for count in OPERATIONS
        for ranks in options.processes
    ]
    rows += [
        _check_allreduce(ranks, size, machine, options)
        for size in SIZES
        for ranks in options.processes
        if ranks <= MOST_WITH_DATA
    ]
    return rows + _check_starts(machine, options)


def _negotiation(ranks: int, barriers: int, machine: Machine, options: Namespace) -> float:
    costs = machine.costs(options)
    steps = {"steps": STEPS, "wake": costs["message"], "begin": machine.begin, "submit": machine.submit}
    found = run("negotiation", ranks=ranks, tensors=barriers, barriers=1, **costs, **steps)
    return float(found["steady"]["latency"])


def _check_negotiation(ranks: int, barriers: int, machine: Machine, options: Namespace) -> Check:
    real = _real(ranks, options.each, barriers=barriers)
    what = "1 barrier" if barriers == 1 else f"{barriers} barriers"
    return Check(what, ranks, real, _negotiation(ranks, barriers, machine, options))


def _check_allreduce(ranks: int, size: int, machine: Machine, options: Namespace) -> Check:
    """Compares all-reduces. The caches, and so the costs of copies and sums, depend on the world."""
    world = {"ranks": ranks, "each": options.each, "bytes": size, "processors": options.usable}
    real = _real(ranks, options.each, bytes=size)
    memory = run("memory_speed", **world)
    costs = machine.costs(options) | {"stream": machine.stream, "look": machine.look} | memory
    found = run("allreduce", **(costs | world), events=1)
    simulated = found["microseconds"] + _negotiation(ranks, 1, machine, options)
    return Check(f"all-reduce of {size >> 20} MiB", ranks, real, simulated)


def _check_starts(machine: Machine, options: Namespace) -> list[Check]:
    """Compares starts on one host; what a rank does beside the rendezvous is taken from a world of two."""
    costs = simulated_start.measure_costs(machine.stream * 1e6)
    place = simulated_start.Place(MOST_STARTED, 0.0, 1e12, options.usable)
    rows = []
    for ranks in [TWO, *(ranks for ranks in options.processes if ranks <= MOST_STARTED)]:
        starts = STARTS_OF_TWO if ranks == TWO else STARTS
        real = min(scale.start(ranks).seconds for _ in range(starts))
        described = simulated_start.describe(ranks, place.each)
        found = simulated_start.simulate_start(ranks, place, costs, described)
        if ranks == TWO:
            costs = simulated_start.with_base(costs, real - found.seconds, ranks, place)
        else:
            rows.append(Check("init()", ranks, real * 1e6, found.seconds * 1e6))
    return rows
