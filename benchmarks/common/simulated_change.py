"""A model of an elastic change among many ranks: a host ends, and the others go on as the next generation.

The steps are those of docs/design/elastic_protocol.md: the survivors learn of the loss (`simulated.lose`),
each enlists with the arbiter, which sends each the description of the new world, and all begin again with an
init(). Messages are the real ones, at full size, and so is the time to write and to read them. Workers of
elastic jobs connect to the rendezvous directly. What the program does is not part of it: reading a commit,
and sending the state to newcomers.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common import native, simulated
from common.options import MIB
from common.simulated_start import Place, StartCosts, describe, measure_costs, simulate_start, timed
from sirtaki.bindings.bootstrap.elastic import messages

PACKED = 16  # messages by which the cost of one is measured


@dataclass(frozen=True)
class Change:
    """A simulated change. Times in seconds.

    Attributes:
        ranks: before the loss of a host.
        noticed: the last survivor knows of the loss.
        enlisted: the arbiter has the messages of all survivors.
        described: the last survivor has the description of the new world.
        started: the init() of the new world has ended; the whole change.
        bytes: sent by the arbiter.
        starts_sent: bytes that the rendezvous sends in the init().
    """

    ranks: int
    noticed: float
    enlisted: float
    described: float
    started: float
    bytes: int
    starts_sent: int


def simulate_all(options: Namespace) -> list[Change]:
    (machine,) = native.run("calibrate")
    costs = measure_costs(machine["stream"] * 1e6)
    few = [ranks for ranks in options.ranks if ranks <= simulated.MOST_WITH_LINKS]
    return [simulate(ranks, costs, options) for ranks in simulated.worlds(few, options, hosts=4)]


def simulate(ranks: int, costs: StartCosts, options: Namespace) -> Change:
    left = ranks - options.each
    place = Place(options.each, options.latency * 1e-6, options.gigabits * 1e9 / 8, options.cores, False)
    noticed = simulated.lose(ranks, True, options).last * 1e-6
    enlisted = left * costs.server_gather + place.latency
    world = describe_world(left, options.each)
    writing, reading, size = cost_of(world)
    described = left * writing + max(left * size / costs.stream, left * size / place.bandwidth) + reading
    start = simulate_start(left, place, costs, describe(left, options.each))
    moments = [noticed]
    for seconds in (enlisted, described + place.latency, start.seconds):
        moments.append(moments[-1] + seconds)
    return Change(ranks, *moments, left * size, start.sent_by_server)


def describe_world(ranks: int, each: int) -> messages.World:
    """Returns what the arbiter sends to a member, when all can restore the commit."""
    slots = [f"host{rank // each}:{rank % each}" for rank in range(ranks)]
    return messages.World(
        generation=2,
        rank=0,
        slots=slots,
        workers=list(range(ranks)),
        initial=ranks + each,
        job="job/2/" + 64 * "0",
        address="10.0.0.1:40000",
        commit=17,
        current=list(range(ranks)),
        joined=0,
        text=f"{each} ranks were lost",
        elapsed=1_000_000,
    )


def cost_of(world: messages.World) -> tuple[float, float, int]:
    """Returns the seconds to write and to read a description of the world, and its bytes."""
    packed = messages.pack(world)
    writing = statistics.median(
        timed(lambda rank=rank: messages.pack(replace(world, rank=rank))) for rank in range(PACKED)
    )
    reading = statistics.median(
        timed(lambda: messages.unpack(packed, (messages.World,))) for _ in range(PACKED)
    )
    return writing, reading, len(packed)


CHANGES: Sequence[tuple[str, Callable[[Any], str]]] = [
    ("ranks", lambda row: f"{row.ranks:,}"),
    ("all know, s", lambda row: f"{row.noticed:,.2f}"),
    ("all are enlisted", lambda row: f"{row.enlisted:,.2f}"),
    ("all know the new world", lambda row: f"{row.described:,.2f}"),
    ("all have started", lambda row: f"{row.started:,.2f}"),
    ("arbiter sends, MiB", lambda row: f"{row.bytes / MIB:,.1f}"),
    ("rendezvous sends, MiB", lambda row: f"{row.starts_sent / MIB:,.0f}"),
]
