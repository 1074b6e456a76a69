"""The messages between a rank and the rendezvous after the handshake.

Each message is one frame of `wire`; its first byte is its type.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sirtaki.bindings.bootstrap.connection.wire import pack_frame, take_frame
from sirtaki.bindings.bootstrap.job import Identity, RendezvousError, name_of

# From a rank: the job's size; a round and a payload; an event and its text; the rank at fault and why.
JOIN, GATHER, REPORT, JOIN_FAILED = b"J", b"G", b"R", b"F"
# To a rank: the session, and a collector's route; the payloads of all ranks; the reason for a refusal.
WELCOME, GATHERED, REFUSED, TIMED_OUT = b"W", b"A", b"X", b"T"
# In both directions, on connections of workers: bytes that the rendezvous passes on.
MESSAGE = b"M"
# From a rank that runs a function of `sirtaki.run`, on a connection of the channel CALLS: a request for the
# launcher; to it: the answer.
CALL = b"C"
# To a rank at any time, waiting or not: the rank at fault, and what failed first in this generation.
FAILED = b"F"

# From a host's collector, which numbers the connections of its ranks: a number with the identity that has
# proved itself; a number and a message from there; the number of a connection that has ended.
ARRIVED, PASSED, LEFT = b"+", b">", b"-"
# To a collector: numbers, and the message for all of them; the number of a connection that it is to close.
DELIVER, CLOSE = b"<", b"-"
# Between the two: a request to continue on a new connection, with the token of the interrupted one and the
# number of messages received there; the answer, with that of the other side; during a connection, the same
# number, so that the other side keeps no longer what has arrived. Such messages are not counted.
RESUME, RESUMED, CONFIRM = b"~", b"~", b"="
# To a collector: the request to say when all its ranks have closed their connections; from it: they have.
DRAIN, DRAINED = b"!", b"!"
# The end of a connection that is not to be continued; not counted.
GOODBYE = b"."

NUMBER = struct.Struct("!I")
COUNT = struct.Struct("!Q")
TOKEN_BYTES = 16
_IDENTITY = struct.Struct("!iiH")  # rank, generation, channel
SESSION_BYTES = 16
PAYLOAD_LIMIT = 64 * 1024
REQUEST_LIMIT = PAYLOAD_LIMIT + 64
CALL_LIMIT = 1024 * 1024 + 64
TEXT_LIMIT = 4000
COLLECTED_LIMIT = CALL_LIMIT + 64  # of a message from a collector
DELIVERED_LIMIT = 16 * 1024 * 1024  # of a message to a rank: a World describes all members
REPORTS = ("initialised", "finished", "aborted", "peer_lost", "thread_failed", "can_stop")
_MALFORMED = "the rendezvous does not understand this message"


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


def describe(event: RankEvent) -> str:
    """Formats an event as part of a sentence."""
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
    return f"{name_of(event.rank)} has {what}" + (f": {event.text}" if event.text else "")


def pack_failure(rank: int, text: str) -> bytes:
    """Packs a failure, in both directions alike: JOIN_FAILED and FAILED are the same byte."""
    return FAILED + NUMBER.pack(rank) + text[:TEXT_LIMIT].encode(errors="replace")


def unpack_failure(body: bytes) -> tuple[int, str]:
    """Returns the rank at fault, and what failed. Raises RendezvousError if these bytes are malformed."""
    if len(body) < NUMBER.size:
        raise RendezvousError(_MALFORMED)
    return NUMBER.unpack_from(body)[0], body[NUMBER.size :].decode(errors="replace")


def pack_report(event: str, text: str) -> bytes:
    return REPORT + event.encode() + b"\0" + text[:TEXT_LIMIT].encode(errors="replace")


def unpack_report(body: bytes) -> tuple[str, str]:
    event, _, text = body.partition(b"\0")
    return event.decode(errors="replace"), text.decode(errors="replace")


def pack_payloads(payloads: tuple[bytes, ...]) -> bytes:
    return GATHERED + b"".join(map(pack_frame, payloads))


def unpack_payloads(body: bytes, count: int) -> list[bytes]:
    """Returns the payloads of `count` ranks. Raises RendezvousError if these bytes are malformed."""
    payloads: list[bytes] = []
    rest = bytearray(body)
    while len(payloads) < count and (payload := take_frame(rest, PAYLOAD_LIMIT)) is not None:
        payloads.append(payload)
    if len(payloads) != count or rest:
        raise RendezvousError("the rendezvous sent a malformed answer")
    return payloads


def gathered_limit(size: int) -> int:
    """Returns the maximum size, in bytes, of the answer to an all-gather of `size` ranks."""
    return 1 + size * (NUMBER.size + PAYLOAD_LIMIT)


def pack_welcome(session: bytes, route: Route | None = None) -> bytes:
    """Packs a welcome, with the route if it is a collector's."""
    if route is None:
        return WELCOME + session
    return WELCOME + session + bytes([route.encrypt]) + ",".join(route.addresses).encode()


def unpack_welcome(body: bytes) -> tuple[bytes, Route | None]:
    """Returns the session and a collector's route. Raises RendezvousError if these bytes are malformed."""
    session, rest = body[:SESSION_BYTES], body[SESSION_BYTES:]
    if not rest:
        return session, None
    addresses = [item for item in rest[1:].decode(errors="replace").split(",") if item]
    try:
        for address in addresses:
            ipaddress.ip_address(address)
    except ValueError:
        raise RendezvousError("the collector of this host sent a malformed answer") from None
    return session, Route(rest[0] != 0, addresses)


def pack_collector_join(size: int, token: bytes) -> bytes:
    """Packs a collector's first message: like a rank's, plus the token for resuming the session later."""
    return JOIN + NUMBER.pack(size) + token


def pack_resumption(token: bytes, received: int) -> bytes:
    """Packs a collector's first message on a new connection that resumes its session."""
    return RESUME + token + COUNT.pack(received)


def unpack_resumption(body: bytes) -> tuple[bytes, int]:
    """Returns the token and the number of received messages. Raises RendezvousError."""
    if len(body) != TOKEN_BYTES + COUNT.size:
        raise RendezvousError(_MALFORMED)
    return body[:TOKEN_BYTES], COUNT.unpack_from(body, TOKEN_BYTES)[0]


def unpack_count(body: bytes) -> int:
    """Returns a number of received messages. Raises RendezvousError if these bytes are malformed."""
    if len(body) != COUNT.size:
        raise RendezvousError(_MALFORMED)
    return int(COUNT.unpack(body)[0])


def pack_arrival(number: int, identity: Identity) -> bytes:
    """Packs the identity of a rank that has connected to a collector."""
    return (
        ARRIVED + NUMBER.pack(number) + _IDENTITY.pack(identity.rank, identity.generation, identity.channel)
    )


def unpack_identity(body: bytes) -> Identity:
    """Returns the identity of such a rank. Raises RendezvousError if these bytes are malformed."""
    if len(body) != _IDENTITY.size:
        raise RendezvousError(_MALFORMED)
    return Identity(*_IDENTITY.unpack(body))


def unpack_collected(message: bytes) -> tuple[bytes, int, bytes]:
    """Returns the kind of a collector's message, its number, and the rest.

    Raises RendezvousError if these bytes are malformed.
    """
    if len(message) < 1 + NUMBER.size:
        raise RendezvousError(_MALFORMED)
    return message[:1], NUMBER.unpack_from(message, 1)[0], message[1 + NUMBER.size :]


def pack_delivery(numbers: Sequence[int]) -> bytes:
    """Packs what stands before a message for these connections of a collector."""
    return DELIVER + struct.pack(f"!I{len(numbers)}I", len(numbers), *numbers)


def unpack_delivery(body: bytes) -> tuple[Sequence[int], bytes]:
    """Returns the connections of a collector, and the message for them. Raises RendezvousError if these bytes
    are malformed.
    """
    count = NUMBER.unpack_from(body)[0] if len(body) >= NUMBER.size else 0
    end = (1 + count) * NUMBER.size
    if not 0 < count <= len(body) or len(body) <= end:
        raise RendezvousError("the rendezvous sent a malformed answer")
    return struct.unpack_from(f"!{count}I", body, NUMBER.size), body[end:]


def delivered_limit(size: int) -> int:
    """Returns the maximum size, in bytes, of a message to a collector of a job of `size` ranks."""
    return max(gathered_limit(size), CALL_LIMIT) + (2 + 2 * size) * NUMBER.size
