"""Real processes on this machine beside as many simulated ranks, which share its processors.

The simulation is given the cost of a message between two processes (`calibrate`), for each all-reduce the
speed of memory for as many ranks (`memory_speed`), and what the code around the state machines costs: for a
step, for each of its operations, and for a start. These costs are measured in a world of few ranks, whose
processors are idle at times, and in one of many ranks for each processor, whose caches hold nothing of the
rank that runs next. For a world in between they follow the logarithm of the number of ranks. All other
worlds are the check.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log
from typing import Any

import scale

from common import native, simulated_start
from common.simulated import milliseconds, run

OPERATIONS = (1, 100)  # barriers of a step: negotiation without data
SIZES = (1 << 20, 16 << 20)
MOST_WITH_DATA = 64  # ranks of an all-reduce: each has a connection to each other one
MOST_STARTED = 64  # ranks of init()
STEPS, STEPS_OF_FEW = 51, 101  # of several hosts, and of one
STARTS, STARTS_OF_FEW = 5, 9
FEW, MANY = 2, 32  # ranks a processor, by which costs are measured; one, and MANY, for a start
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
class Between:
    """A cost in worlds of few and of many ranks."""

    ranks: tuple[int, int]
    costs: tuple[float, float]

    def of(self, ranks: int) -> float:
        """Returns the cost in a world of this size; outside of the two, that of the nearer one."""
        few, many = self.ranks
        share = min(max(log(ranks / few) / log(many / few), 0.0), 1.0)
        return self.costs[0] + share * (self.costs[1] - self.costs[0])


NOTHING = Between((1, 2), (0.0, 0.0))


@dataclass(frozen=True)
class Machine:
    """Costs of this machine: ns of a message; MB/s of a stream; ns of a look by a rank that waits; ns of a
    processor for a step, and for an operation in it.
    """

    message: int
    stream: int
    look: int
    begin: Between = NOTHING
    submit: Between = NOTHING

    def costs(self, options: Namespace) -> dict[str, int]:
        """Returns the numbers of the drivers. A message costs its sender and its receiver half each."""
        half = self.message // 2
        return {"message": half, "processors": options.usable, "each": options.each, **FAST}


def calibrate(options: Namespace) -> Machine:
    (found,) = native.run("calibrate")
    machine = Machine(**found)
    worlds = _calibrating(FEW, options)
    steps = [_surroundings(ranks, machine, options) for ranks in worlds]
    begin, submit = (Between(worlds, costs) for costs in zip(*steps, strict=True))
    return replace(machine, begin=begin, submit=submit)


def _calibrating(few: int, options: Namespace) -> tuple[int, int]:
    """Returns the sizes of the worlds by which costs are measured; few: ranks a processor in the smaller."""
    many = min(MANY * options.usable, MOST_STARTED)
    return min(few * options.usable, many // 2), many


def _surroundings(ranks: int, machine: Machine, options: Namespace) -> tuple[float, float]:
    """Returns the unexplained nanoseconds of a processor: of a step, and of each operation in it."""

    def of_a_rank(barriers: int) -> float:
        unexplained = _real(ranks, options.each, barriers=barriers)
        unexplained -= _negotiation(ranks, barriers, machine, options)
        return 1e3 * unexplained * options.usable / ranks

    few, many = map(of_a_rank, OPERATIONS)
    submit = max((many - few) / (OPERATIONS[1] - OPERATIONS[0]), 0.0)
    return max(few - submit, 0.0), submit


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
    around = {"begin": round(machine.begin.of(ranks)), "submit": round(machine.submit.of(ranks))}
    steps = {"steps": STEPS, "wake": costs["message"], **around}
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
    """Compares starts on one host."""
    worlds = _calibrating(1, options)
    costs = simulated_start.measure_costs(machine.stream * 1e6)
    place = simulated_start.Place(MOST_STARTED, 0.0, 1e12, options.usable)

    def simulate(ranks: int, base: float) -> float:
        described = simulated_start.describe(ranks, place.each)
        return simulated_start.simulate_start(ranks, place, replace(costs, base=base), described).seconds

    def unexplained(ranks: int) -> float:
        return simulated_start.base_of(real(ranks) - simulate(ranks, 0.0), ranks, place)

    real = cache(_real_start)
    base = Between(worlds, (unexplained(worlds[0]), unexplained(worlds[1])))
    return [
        Check("init()", ranks, real(ranks) * 1e6, simulate(ranks, base.of(ranks)) * 1e6)
        for ranks in options.processes
        if ranks <= MOST_STARTED
    ]


def _real_start(ranks: int) -> float:
    """Returns the seconds of the shortest of several starts."""
    return min(scale.start(ranks).seconds for _ in range(STARTS_OF_FEW if ranks <= FEW else STARTS))
