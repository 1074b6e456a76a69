"""The messages between a rank and the rendezvous: events, and the payloads that have a structure."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from sirtaki.bindings.bootstrap.connection.wire import FROM, Frame, MessageKind, Sender, take_frame
from sirtaki.bindings.bootstrap.job import Identity

_IDENTITY = struct.Struct("!iH")  # generation, channel
SESSION_BYTES = 16
PAYLOAD_LIMIT = MessageKind.GATHER.limit
REPORTS = ("initialised", "finished", "aborted", "peer_lost", "thread_failed", "can_stop")


@dataclass(frozen=True)
class RankEvent:
    """An event that the rendezvous reports to the process that runs it.

    kind: one of REPORTS, as that rank reported it; "arrived": a rank has begun an init; "overdue": others
    waited in vain for the ranks `missing`; "departed": those have ended, or their init failed;
    "disconnected": the connection of a rank that had initialised ended before it reported its end; "refused":
    a client was rejected (its rank, or -1 if unknown).
    """

    kind: str
    rank: int
    generation: int
    text: str = ""
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class Route:
    """The way from a host's collector to the rendezvous: whether its setting is to encrypt connections, and
    the addresses of its machine on that way.
    """

    encrypt: bool
    addresses: Sequence[str]


def describe(event: RankEvent, name: Callable[[int], str] = "rank {}".format) -> str:
    """Formats an event as part of a sentence; `name` returns the name of the process with a number."""
    if event.kind in ("overdue", "departed"):
        return event.text
    if event.kind == "refused":
        return f"it refused a client: {event.text}"
    known = {
        "arrived": "called init",
        "peer_lost": "lost another rank",
        "thread_failed": "lost a thread",
        "can_stop": "called hvd.should_stop()",
    }
    what = known.get(event.kind, event.kind)
    return f"{name(event.rank)} has {what}" + (f": {event.text}" if event.text else "")


def pack_payloads(payloads: Sequence[bytes]) -> Frame:
    """Packs the payloads of all ranks, behind their lengths."""
    lengths = struct.pack(f"!{len(payloads)}I", *map(len, payloads))
    return Frame(MessageKind.GATHERED, payload=b"".join((lengths, *payloads)))


def unpack_payloads(gathered: Frame, count: int) -> list[bytes]:
    """Returns the payloads of `count` ranks. Raises RendezvousError if these bytes are malformed."""
    payload, begin = gathered.payload, 4 * count
    lengths = struct.unpack_from(f"!{count}I", payload) if len(payload) >= begin else ()
    if begin + sum(lengths) != len(payload) or max(lengths, default=0) > PAYLOAD_LIMIT:
        raise gathered.malformed()
    return [payload[start:end] for start, end in pairwise(accumulate(lengths, initial=begin))]


def pack_welcome(session: bytes, route: Route | None = None) -> Frame:
    """Packs a welcome, with the route if it is a collector's."""
    there = b"" if route is None else bytes([route.encrypt]) + ",".join(route.addresses).encode()
    return Frame(MessageKind.WELCOME, payload=session + there)


def unpack_welcome(welcome: Frame) -> tuple[bytes, Route | None]:
    """Returns the session and a collector's route. Raises RendezvousError if these bytes are malformed."""
    session, rest = welcome.payload[:SESSION_BYTES], welcome.payload[SESSION_BYTES:]
    if not rest:
        return session, None
    addresses = [item for item in rest[1:].decode(errors="replace").split(",") if item]
    try:
        for address in addresses:
            ipaddress.ip_address(address)
    except ValueError:
        raise welcome.malformed() from None
    return session, Route(rest[0] != 0, addresses)


def pack_arrival(number: int, identity: Identity) -> Frame:
    """Packs the identity of a rank that has connected to a collector."""
    payload = _IDENTITY.pack(identity.generation, identity.channel)
    return Frame(MessageKind.ARRIVED, identity.rank, payload, number)


def unpack_arrival(arrival: Frame) -> Identity:
    """Returns the identity of such a rank. Raises RendezvousError if these bytes are malformed."""
    if len(arrival.payload) != _IDENTITY.size:
        raise arrival.malformed()
    return Identity(arrival.rank, *_IDENTITY.unpack(arrival.payload))


def unpack_said(said: Frame, sender: Sender) -> Frame:
    """Returns the frame of a client of a collector. Raises RendezvousError if these bytes are malformed."""
    rest = bytearray(said.payload)
    frame = take_frame(rest, FROM[sender])
    if frame is None or rest:
        raise said.malformed()
    return frame


def pack_delivery(numbers: Sequence[int], frame: bytes, ranks: int) -> bytes:
    """Packs what stands before a frame for these connections of a collector of a job of `ranks` ranks."""
    payload = struct.pack(f"!{len(numbers)}I", *numbers)
    return Frame(MessageKind.DELIVER, payload=payload, number=len(numbers)).pack(ranks, len(frame))


def unpack_delivery(delivery: Frame) -> tuple[Sequence[int], bytes]:
    """Returns the connections of a collector, and the frame for them. Raises RendezvousError if these bytes
    are malformed.
    """
    count, payload = delivery.number, delivery.payload
    if not 0 < 4 * count < len(payload):
        raise delivery.malformed()
    return struct.unpack_from(f"!{count}I", payload), payload[4 * count :]
