"""The connections between ranks: a message each way for the latency, large ones one way for the bandwidth."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

import sirtaki.numpy as hvd
from sirtaki.bench.patterns import Array
from sirtaki.common import basics
from sirtaki.runner.bench.messages import LinkSpeeds, Plan
from sirtaki.runner.bench.samples import timed

_SMALL = 8  # bytes
_CALLS, _WARM_UP_CALLS = 200, 20
_MOST_RANKS = 64


def measure_links(plan: Plan, first: Sequence[int], note: Callable[[str], None]) -> LinkSpeeds:
    """Measures one connection after the other: those among the `first` ranks of the hosts, or among all ranks
    of a single host. All ranks have to call it.
    """
    ranks = (first if len(first) > 1 else range(basics.size()))[:_MOST_RANKS]
    hosts = hvd.allgather_object(socket.gethostname())
    rates = [[0.0] * len(ranks) for _ in ranks]
    latencies = [[0.0] * len(ranks) for _ in ranks]
    wrong = 0
    for row, source in enumerate(ranks):
        for column, target in enumerate(ranks):
            if source == target:
                continue
            note(f"rank {source} to rank {target}")
            hvd.barrier()
            found = _measure(source, target, plan)
            rate, latency, mistakes = hvd.allreduce(np.array(found), op=hvd.Sum, name="bench link").tolist()
            rates[row][column], latencies[row][column] = rate, latency
            wrong += int(mistakes)
    names = tuple(hosts[rank] for rank in ranks)
    return LinkSpeeds(tuple(ranks), names, _frozen(rates), _frozen(latencies), wrong)


def _frozen(matrix: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, matrix))


def _measure(source: int, target: int, plan: Plan) -> tuple[float, float, float]:
    """Returns bytes per second and microseconds at the source, wrong bytes at the target, and 0 elsewhere."""
    rank = basics.rank()
    if rank not in (source, target):
        return 0.0, 0.0, 0.0
    other = target if rank == source else source
    small, large = np.zeros(_SMALL, np.uint8), np.zeros(plan.last, np.uint8)
    answer = np.zeros(1, np.uint8)
    if rank == source:
        large[:] = _pattern(plan.last)
    trip = _both_ways(rank == source, small, np.zeros_like(small), other)
    timed(trip, _WARM_UP_CALLS)
    round_trips = timed(trip, _CALLS)
    way = _both_ways(rank == source, large, answer, other)
    timed(way, 1)
    times = timed(way, plan.rounds)
    if rank == target:
        return 0.0, 0.0, float(np.count_nonzero(large != _pattern(plan.last)))
    return plan.last / median(times) * 1e6, median(round_trips) / 2, 0.0


def _both_ways(is_source: bool, message: Array, answer: Array, other: int) -> Callable[[], None]:
    """Returns a call in which a message travels from the source to the target, and then an answer back."""

    def call() -> None:
        if is_source:
            hvd.send(message, other, name="bench message")
            hvd.recv(answer, other, name="bench answer")
        else:
            hvd.recv(message, other, name="bench message")
            hvd.send(answer, other, name="bench answer")

    return call


def _pattern(size: int) -> Array:
    return np.resize(np.arange(251, dtype=np.uint8), size)
