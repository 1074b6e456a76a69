"""Real processes on this machine beside as many simulated ranks, which share its processors.

The simulation is given costs that are measured among as many processes as the world has, because the caches,
and with them all costs, depend on that number, but never in the world itself: of a message and of a look
(`calibrate`), of copies and sums (`memory_speed`), and of what surrounds the state machines. The latter is
the time that the simulation does not explain of two worlds of half the size, side by side (`SideBySide`).
For a start it comes from worlds of few and of many ranks, between which it follows the logarithm of the
number of ranks; these two are no check.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log
from typing import Any, NamedTuple

import scale

from common import native, simulated_start
from common.simulated import milliseconds, run

OPERATIONS = (1, 100)  # barriers of a step: negotiation without data
SIZES = (1 << 20, 16 << 20)
MOST_WITH_DATA = 64  # ranks of an all-reduce: each has a connection to each other one
MOST_STARTED = 64  # ranks of init()
STEPS, STEPS_OF_FEW = 51, 101  # of several hosts, and of one
ROUNDS = 3  # in which a world and its parts take turns
STARTS, STARTS_OF_FEW = 5, 9
FEW = 2  # ranks of a start that is so short that more of them are measured
MANY = 32  # ranks a processor of the larger world by which the costs of a start are measured
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


@dataclass(frozen=True)
class SideBySide:
    """Worlds that together have the processes of the world for which they stand, and share its processors.

    Each has as many hosts as that world, so that its ranks wait in the same places.
    """

    ranks: int  # of each
    each: int  # on each of its hosts
    count: int
    processors: int

    @classmethod
    def of(cls, ranks: int, options: Namespace) -> SideBySide:
        count = min(options.beside, ranks // 2)
        return cls(ceil(ranks / count), ceil(options.each / count), count, options.usable)

    @property
    def crowd(self) -> float:
        """The number of ranks that share a processor."""
        return max(self.ranks * self.count / self.processors, 1.0)

    @property
    def a_world(self) -> int:
        """The processors that the work of each world takes; with too few for all, worlds take turns."""
        return max(self.processors // self.count, 1)

    @property
    def one(self) -> dict[str, int]:
        """One of the worlds, as simulations take it."""
        return {"ranks": self.ranks, "each": self.each, "processors": self.a_world}

    @property
    def turns(self) -> float:
        """The number of worlds that a processor serves one after another."""
        return max(self.count / self.processors, 1.0)

    def unexplained(self, real: float, simulated: float) -> float:
        """Returns the time of a processor for each rank that the simulation of a world does not explain."""
        return max(real - simulated * self.turns, 0.0) / self.crowd


class Measured(NamedTuple):
    """The steps of a world, and of the worlds side by side that stand for it."""

    whole: float
    parts: float


class World:
    """Real and simulated steps of one number of ranks. Times are in microseconds."""

    def __init__(self, ranks: int, options: Namespace) -> None:
        self.ranks = ranks
        self.crowd = max(ranks / options.usable, 1.0)  # ranks that share a processor
        self.whole = {"ranks": ranks, "each": options.each, "processors": options.usable}
        self.parts = SideBySide.of(ranks, options)
        (machine,) = native.run("calibrate", f"processes={max(2 * round(self.crowd / 2), 2)}")
        half = machine.pop("message") // 2  # of its sender, and of its receiver
        self.costs = {**machine, "message": half, **FAST}
        self.barriers = {count: self._measure(barriers=count) for count in OPERATIONS}
        few, many = map(self._around_barriers, OPERATIONS)
        submit = max((many - few) / (OPERATIONS[1] - OPERATIONS[0]), 0.0)
        self.around = {"submit": round(1e3 * submit), "begin": round(1e3 * max(few - submit, 0.0))}

    def check_negotiation(self, barriers: int) -> Check:
        simulated = self._negotiate(self.whole, barriers, self.around)
        what = "1 barrier" if barriers == 1 else f"{barriers} barriers"
        return Check(what, self.ranks, self.barriers[barriers].whole, simulated)

    def check_allreduce(self, size: int) -> Check:
        measured = self._measure(bytes=size)
        memory = run("memory_speed", bytes=size, **self.whole)
        simulated = self._allreduce(self.whole, size, memory)
        simulated += self.crowd * self._around_allreduce(size, measured.parts, memory)
        return Check(f"all-reduce of {size >> 20} MiB", self.ranks, measured.whole, simulated)

    def _around_barriers(self, count: int) -> float:
        """Returns the unexplained time of a processor for a step of each rank of the worlds side by side."""
        simulated = self._negotiate(self.parts.one, count, {})
        return self.parts.unexplained(self.barriers[count].parts, simulated)

    def _around_allreduce(self, size: int, real: float, memory: dict[str, int]) -> float:
        share = self.parts.a_world / self.parts.processors
        speeds = {name: round(memory[name] * share) for name in ("memory", "sums")}
        simulated = self._allreduce(self.parts.one, size, {**memory, **speeds})
        return self.parts.unexplained(real, simulated)

    def _measure(self, **work: int) -> Measured:
        """Returns the shortest steps of real processes: the least disturbed ones. Both worlds take turns."""
        whole, parts = self.whole, self.parts
        steps = (STEPS_OF_FEW if self.ranks <= whole["each"] else STEPS) // ROUNDS

        def shortest(ranks: int, each: int, worlds: int = 1) -> float:
            world = {"ranks": ranks, "each": each, "worlds": worlds}
            return float(min(run("many_ranks", steps=steps, **world, **work)["steady"]))

        rounds = [
            (shortest(self.ranks, whole["each"]), shortest(parts.ranks, parts.each, parts.count))
            for _ in range(ROUNDS)
        ]
        return Measured(*map(min, zip(*rounds, strict=True)))

    def _negotiate(self, world: dict[str, int], barriers: int, around: dict[str, int]) -> float:
        costs = {name: cost for name, cost in self.costs.items() if name not in ("stream", "look")}
        steps = {"tensors": barriers, "barriers": 1, "steps": STEPS, "wake": costs["message"]}
        found = run("negotiation", **world, **steps, **costs, **around)
        return float(found["steady"]["latency"])

    def _allreduce(self, world: dict[str, int], size: int, memory: dict[str, int]) -> float:
        """Returns the time of an all-reduce and of its negotiation."""
        found = run("allreduce", bytes=size, events=1, **world, **self.costs, **memory)
        return float(found["microseconds"]) + self._negotiate(world, 1, self.around)


def check_all(options: Namespace) -> list[Check]:
    rows = []
    for ranks in options.processes:
        world = World(ranks, options)
        rows += [world.check_negotiation(count) for count in OPERATIONS]
        rows += [world.check_allreduce(size) for size in SIZES if ranks <= MOST_WITH_DATA]
    return sorted(rows, key=lambda row: row.what) + _check_starts(options)


def _check_starts(options: Namespace) -> list[Check]:
    """Compares starts on one host, but for the two worlds by which their costs are measured."""
    many = min(MANY * options.usable, MOST_STARTED)
    worlds = min(options.usable, many // 2), many
    (machine,) = native.run("calibrate")
    costs = simulated_start.measure_costs(machine["stream"] * 1e6)
    place = simulated_start.Place(MOST_STARTED, 0.0, 1e12, options.usable)

    def simulate(ranks: int, base: float) -> float:
        described = simulated_start.describe(ranks, place.each)
        return simulated_start.simulate_start(ranks, place, replace(costs, base=base), described).seconds

    def unexplained(ranks: int) -> float:
        return simulated_start.base_of(_real_start(ranks) - simulate(ranks, 0.0), ranks, place)

    base = Between(worlds, (unexplained(worlds[0]), unexplained(worlds[1])))
    return [
        Check("init()", ranks, _real_start(ranks) * 1e6, simulate(ranks, base.of(ranks)) * 1e6)
        for ranks in options.processes
        if ranks <= MOST_STARTED and ranks not in worlds
    ]


def _real_start(ranks: int) -> float:
    """Returns the seconds of the shortest of several starts."""
    return min(scale.start(ranks).seconds for _ in range(STARTS_OF_FEW if ranks <= FEW else STARTS))
