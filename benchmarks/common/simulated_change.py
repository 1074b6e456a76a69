"""A model of an elastic change among many ranks: a host ends, and the others go on as the next generation.

The steps are those of docs/design/elastic_protocol.md: the survivors learn of the loss (`lost_rank.cc`),
each enlists with the arbiter, which sends each the description of the new world, and all begin again with an
init(). Messages are the real ones, at full size, and so is the time to write and to read them. Workers of
elastic jobs connect to the rendezvous directly. What the program does is not part of it: reading a commit,
and sending the state to newcomers.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace

from common.options import MIB
from common.report import Columns, Row
from common.simulated_start import Place, StartCosts, describe, measure_costs, simulate_start, timed
from sirtaki.runner.rendezvous.elastic import messages

PACKED = 16  # messages by which the cost of one is measured


def simulate_all(noticed: Mapping[int, float], options: Namespace) -> list[Row]:
    """Simulates changes; `noticed`: seconds until all know of the loss, by the number of ranks before it."""
    costs = measure_costs()
    return [simulate(ranks, seconds, costs, options) for ranks, seconds in noticed.items()]


def simulate(ranks: int, noticed: float, costs: StartCosts, options: Namespace) -> Row:
    """Returns the moments, in seconds after the loss of a host, until which the last survivor has noticed the
    loss, has enlisted, has the description of the new world, and has ended its init(); and the bytes that the
    arbiter sends, and the rendezvous in the init().
    """
    left = ranks - options.each
    place = Place(options.each, options.latency * 1e-6, options.gigabits * 1e9 / 8, False)
    writing, reading, size = cost_of(describe_world(left, options.each))
    enlisted = noticed + left * costs.server_gather + place.latency
    sending = max(left * size / costs.stream, left * size / place.bandwidth)
    described = enlisted + left * writing + sending + reading + place.latency
    start = simulate_start(left, place, costs, describe(left, options.each))
    return {
        "ranks": ranks,
        "noticed": noticed,
        "enlisted": enlisted,
        "described": described,
        "started": described + start["seconds"],
        "bytes": left * size,
        "starts_sent": start["sent_by_server"],
    }


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


CHANGES: Columns = {
    "ranks": "{ranks:,}",
    "all know, s": "{noticed:,.2f}",
    "all are enlisted": "{enlisted:,.2f}",
    "all know the new world": "{described:,.2f}",
    "all have started": "{started:,.2f}",
    "arbiter sends, MiB": lambda row: f"{row['bytes'] / MIB:,.1f}",
    "rendezvous sends, MiB": lambda row: f"{row['starts_sent'] / MIB:,.0f}",
}
