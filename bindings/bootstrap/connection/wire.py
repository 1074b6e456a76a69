"""Bytes on a connection with a deadline, and the frames in which messages travel on all connections.

A frame is a fixed header and a payload. Nothing of a payload is read before its kind and its length were
compared with the table in `message_kinds`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from sirtaki.bindings.bootstrap.connection.message_kinds import (
    HEADER,
    KINDS,
    PER_RANK,
    Form,
    MessageKind,
)
from sirtaki.bindings.bootstrap.job import HandshakeError, RendezvousTimeout

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection

NO_RANK = -1
TEXT_LIMIT = 4000  # characters
_MAGIC = b"srt2"
_EARLIER = b"sirt"  # of the frames of sirtaki 0.2.0 and before
_STRANGER = "another process writes to the connection"


class WireError(HandshakeError):
    """The peer has sent malformed data."""


@dataclass(frozen=True)
class Frame:
    kind: MessageKind
    rank: int = NO_RANK
    payload: bytes = b""
    number: int = 0

    @classmethod
    def of(
        cls, kind: MessageKind, content: str | Mapping[str, Any], rank: int = NO_RANK, number: int = 0
    ) -> Frame:
        """Returns a frame with JSON or text, as is the form of its kind; long texts are cut."""
        text = json.dumps(content) if kind.form is Form.JSON else str(content)[:TEXT_LIMIT]
        return cls(kind, rank, text.encode(errors="replace"), number)

    def pack(self, ranks: int = 0, rest: int = 0) -> bytes:
        """Returns the frame as sent. Raises WireError if it is too long for a job of `ranks` ranks.

        `rest`: bytes of the payload that the caller adds.
        """
        length = len(self.payload) + rest
        _check_length(self.kind, length, ranks)
        return HEADER.pack(_MAGIC, self.kind, self.rank, self.number, length) + self.payload

    @property
    def text(self) -> str:
        """Returns the text in the payload, which may contain any characters."""
        return self.payload.decode(errors="replace")

    @property
    def values(self) -> dict[str, Any]:
        """Returns the JSON object in the payload. Raises WireError if it holds none."""
        try:
            values = json.loads(self.payload)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise self.malformed()
        return values

    def fields(self, **types: Any) -> list[Any]:
        """Returns all values of the JSON object in the payload, by names and types: classes, or lists of a
        class. Raises WireError.
        """
        values = self.values
        found = [values.get(name) for name in types]
        if values.keys() != types.keys() or not all(map(_is_of, found, types.values())):
            raise self.malformed()
        return found

    def unexpected(self) -> WireError:
        """Returns the error for a frame that its sender may not send now."""
        return WireError(f"{self.kind.name} is not expected now")

    def malformed(self, reason: object = "") -> WireError:
        """Returns the error for a frame with another content than it has to have."""
        return WireError(f"{self.kind.name} is malformed" + (f": {reason}" if reason else ""))


def _is_of(value: object, wanted: Any) -> bool:
    if items := get_args(wanted):
        return isinstance(value, list) and all(type(item) is items[0] for item in value)
    return type(value) is wanted


def take_frame(buffer: bytearray, accepted: Container[MessageKind], ranks: int = 0) -> Frame | None:
    """Removes the first whole frame from `buffer`; returns None while it is incomplete.

    Raises WireError if it is not of an `accepted` kind, or too long for a job of `ranks` ranks.
    """
    if len(buffer) < HEADER.size:
        _check_magic(buffer)
        return None
    kind, rank, number, length = _checked_header(buffer, accepted, ranks)
    end = HEADER.size + length
    if len(buffer) < end:
        return None
    payload = bytes(buffer[HEADER.size : end])
    del buffer[:end]
    return Frame(kind, rank, payload, number)


def _checked_header(
    header: bytes | bytearray, accepted: Container[MessageKind], ranks: int
) -> tuple[MessageKind, int, int, int]:
    _check_magic(header)
    _, value, rank, number, length = HEADER.unpack_from(header)
    if (kind := KINDS.get(value)) is None:
        raise WireError(_STRANGER)
    if kind not in accepted:
        raise Frame(kind).unexpected()
    _check_length(kind, length, ranks)
    return kind, rank, number, length


def _check_magic(beginning: bytes | bytearray) -> None:
    found = bytes(beginning[: len(_MAGIC)])
    if found == _EARLIER:
        raise WireError("it has an earlier version of sirtaki: install the same version on both")
    if not _MAGIC.startswith(found):
        raise WireError(_STRANGER)


def _check_length(kind: MessageKind, length: int, ranks: int) -> None:
    limit = kind.limit + ranks * PER_RANK.get(kind, 0)
    if length > limit:
        raise WireError(f"{kind.name} has {length} bytes where {limit} are allowed")


def send_all(connection: Connection, data: bytes, deadline: float) -> None:
    """Sends all of `data`; raises RendezvousTimeout at the deadline, EOFError if the peer is gone."""
    rest = memoryview(data)
    while rest:
        connection.settimeout(_time_left(deadline))
        try:
            rest = rest[connection.send(rest) :]
        except TimeoutError:
            raise _too_late() from None
        except ConnectionError:
            raise EOFError("the other side closed the connection") from None


def receive_exactly(connection: Connection, count: int, deadline: float) -> bytes:
    """Receives exactly `count` bytes; raises RendezvousTimeout at the deadline, EOFError at the end of the
    stream.
    """
    received = bytearray()
    while len(received) < count:
        connection.settimeout(_time_left(deadline))
        try:
            part = connection.recv(count - len(received))
        except TimeoutError:
            raise _too_late() from None
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError("the other side closed the connection")
        received += part
    return bytes(received)


def send_frame(connection: Connection, frame: Frame, deadline: float) -> None:
    """Sends a frame. Raises like `send_all`."""
    send_all(connection, frame.pack(), deadline)


def receive_frame(
    connection: Connection, deadline: float, accepted: Container[MessageKind], ranks: int = 0
) -> Frame:
    """Receives a frame. Raises like `receive_exactly` and `take_frame`."""
    header = receive_exactly(connection, HEADER.size, deadline)
    kind, rank, number, length = _checked_header(header, accepted, ranks)
    return Frame(kind, rank, receive_exactly(connection, length, deadline), number)


def printable(text: str, limit: int = 2000) -> str:
    """Makes text from another process fit for display: bounded, and without control characters."""
    shown = text[:limit]
    if shown.isprintable():  # as nearly all of it is: each rank reads the description of every other one
        return shown
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in shown)


def one_line(text: str, limit: int = 2000) -> str:
    """Works like `printable`, and joins lines: text of another process cannot pass for a line of ours."""
    return printable(" ".join(text[:limit].split()), limit)


def _time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _too_late()
    return left


def _too_late() -> RendezvousTimeout:
    return RendezvousTimeout("the other side did not answer in time")


# ---- Bytes that wait until a non-blocking connection takes them ----------------------------------------


SHARED_BYTES = 4096  # from this size on, bytes are kept as they are instead of being copied


class SendQueue:
    """Bytes to send, in order; queues share large messages instead of copying them."""

    def __init__(self) -> None:
        self._parts: deque[bytearray | memoryview] = deque()
        self.size = 0  # bytes that wait

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __iadd__(self, data: bytes) -> SendQueue:
        self.size += len(data)
        if len(data) >= SHARED_BYTES:
            self._parts.append(memoryview(data))
        elif data and self._parts and isinstance(last := self._parts[-1], bytearray):
            last += data
        elif data:
            self._parts.append(bytearray(data))
        return self

    def send(self, connection: Connection) -> None:
        """Sends as much as fits. Raises OSError if the connection is lost."""
        while self._parts:
            part = self._parts[0]
            try:
                sent = connection.send(part)
            except BlockingIOError:
                return
            self.size -= sent
            if sent == len(part):
                self._parts.popleft()
                continue
            self._parts[0] = part[sent:]
            return

    def clear(self) -> None:
        self._parts.clear()
        self.size = 0
