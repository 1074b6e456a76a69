"""The speed of plain TCP from each host of a job to the next one, by all hosts at the same time."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import sirtaki.numpy as hvd
from sirtaki.common import basics
from sirtaki.runner.doctor.facts import Speed
from sirtaki.runner.doctor.probe import TOKEN_BYTES, Listener, measure
from sirtaki.runner.rendezvous.interfaces import chosen_interfaces, local_addresses
from sirtaki.runner.rendezvous.job import RendezvousError


def first_ranks() -> list[int]:
    """Returns the first rank of each host. All ranks have to call it."""
    return [rank for rank, number in enumerate(hvd.allgather_object(basics.local_rank())) if number == 0]


def slowest_stream(first: Sequence[int]) -> tuple[float, int]:
    """Returns bytes per second on the slowest link, over so many connections; (0, 0) if it is unknown.

    All ranks have to call it with the first ranks of the hosts, which measure. On a single host there is
    nothing to measure.
    """
    if len(first) == 1:
        return 0.0, 0
    token = hvd.broadcast_object(secrets.token_bytes(TOKEN_BYTES), root_rank=0)
    is_first = basics.rank() in first
    listeners = hvd.allgather_object((_addresses(), Listener(token).port) if is_first else None)
    speed = None
    if is_first:
        following = first[(first.index(basics.rank()) + 1) % len(first)]
        addresses, port = listeners[following]
        speed = _measure(addresses, port, token)
    speeds = [one for one in hvd.allgather_object(speed) if one is not None]
    rates = [max(one.one_stream, one.several_streams) for one in speeds]
    if len(rates) < len(first) or not min(rates):
        return 0.0, 0
    slowest = min(speeds, key=lambda one: max(one.one_stream, one.several_streams))
    return min(rates), slowest.streams if slowest.several_streams > slowest.one_stream else 1


def _addresses() -> list[str]:
    try:
        return list(local_addresses(chosen_interfaces()))
    except RendezvousError:
        return []


def _measure(addresses: list[str], port: int, token: bytes) -> Speed | None:
    """Measures the connection at the first address that is open; returns None if there is none."""
    for address in addresses:
        try:
            return measure(address, port, token)
        except OSError:
            continue
    return None
