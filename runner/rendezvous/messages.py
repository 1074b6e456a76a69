"""The messages between a rank and the rendezvous after the handshake.

Each message is one frame of `wire`; its first byte is its type.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from sirtaki.runner.rendezvous.job import RendezvousError, name_of
from sirtaki.runner.rendezvous.wire import pack_frame, take_frame

# From a rank: the job's size; a round and a payload; an event and its text; the rank at fault and why.
JOIN, GATHER, REPORT, JOIN_FAILED = b"J", b"G", b"R", b"F"
# To a rank: the session; the payloads of all ranks; the reason for a refusal.
WELCOME, GATHERED, REFUSED, TIMED_OUT = b"W", b"A", b"X", b"T"
# In both directions, on connections of workers: bytes that the rendezvous passes on.
MESSAGE = b"M"
# From a rank that runs a function of `sirtaki.run`, on a connection of the channel CALLS: a request for the
# launcher; to it: the answer.
CALL = b"C"
# To a rank at any time, waiting or not: the rank at fault, and what failed first in this generation.
FAILED = b"F"

NUMBER = struct.Struct("!I")
PAYLOAD_LIMIT = 64 * 1024
REQUEST_LIMIT = PAYLOAD_LIMIT + 64
CALL_LIMIT = 1024 * 1024 + 64
TEXT_LIMIT = 4000
REPORTS = ("initialised", "finished", "aborted", "peer_lost")


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


def describe(event: RankEvent) -> str:
    """Formats an event as part of a sentence."""
    if event.kind in ("overdue", "departed"):
        return event.text
    if event.kind == "refused":
        return f"it refused a client: {event.text}"
    what = {"arrived": "called init", "peer_lost": "lost another rank"}.get(event.kind, event.kind)
    return f"{name_of(event.rank)} has {what}" + (f": {event.text}" if event.text else "")


def pack_failure(rank: int, text: str) -> bytes:
    """Packs a failure; the format is the same in both directions: JOIN_FAILED and FAILED are one letter."""
    return FAILED + NUMBER.pack(rank) + text[:TEXT_LIMIT].encode(errors="replace")


def unpack_failure(body: bytes) -> tuple[int, str]:
    """Returns the rank at fault, and what failed. Raises RendezvousError if these bytes are malformed."""
    if len(body) < NUMBER.size:
        raise RendezvousError("the rendezvous does not understand this message")
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
