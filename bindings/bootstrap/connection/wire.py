"""Bytes on a connection with a deadline, and the frames in which messages travel on all connections.

A frame is a fixed header and a payload. Nothing of a payload is read before its kind and its length were
compared with the table in `message_kinds`.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sirtaki.bindings.bootstrap.connection.message_kinds import KINDS, Form, MessageKind
from sirtaki.bindings.bootstrap.job import HandshakeError, RendezvousTimeout

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection

NO_RANK = -1
TEXT_LIMIT = 4000  # characters
_MAGIC = b"sirt"
_HEADER = struct.Struct("!4sBiQI")  # magic, kind, rank, number, length of the payload
_STRANGER = "another process writes to the connection"
_LENGTH = struct.Struct("!I")


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

    def pack(self) -> bytes:
        """Returns the frame as sent. Raises WireError if it is too long."""
        _check_length(self.kind, len(self.payload))
        header = _HEADER.pack(_MAGIC, self.kind, self.rank, self.number, len(self.payload))
        return header + self.payload

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
            raise WireError(f"{self.kind.name} is malformed")
        return values


def take_message(buffer: bytearray, accepted: Container[MessageKind]) -> Frame | None:
    """Removes the first whole frame from `buffer`; returns None while it is incomplete.

    Raises WireError if it is not of an `accepted` kind, or too long.
    """
    if not _MAGIC.startswith(bytes(buffer[: len(_MAGIC)])):
        raise WireError(_STRANGER)
    if len(buffer) < _HEADER.size:
        return None
    kind, rank, number, length = _checked_header(buffer, accepted)
    end = _HEADER.size + length
    if len(buffer) < end:
        return None
    payload = bytes(buffer[_HEADER.size : end])
    del buffer[:end]
    return Frame(kind, rank, payload, number)


def _checked_header(
    header: bytes | bytearray, accepted: Container[MessageKind]
) -> tuple[MessageKind, int, int, int]:
    _, value, rank, number, length = _HEADER.unpack_from(header)
    if (kind := KINDS.get(value)) is None:
        raise WireError(_STRANGER)
    if kind not in accepted:
        raise WireError(f"{kind.name} is not expected now")
    _check_length(kind, length)
    return kind, rank, number, length


def _check_length(kind: MessageKind, length: int) -> None:
    if length > kind.limit:
        raise WireError(f"{kind.name} has {length} bytes where {kind.limit} are allowed")


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


def frame_header(length: int) -> bytes:
    """Returns what stands before the payload of a frame: four bytes of length."""
    return _LENGTH.pack(length)


def pack_frame(payload: bytes) -> bytes:
    """Returns a frame as sent."""
    return frame_header(len(payload)) + payload


def take_frame(buffer: bytearray, limit: int) -> bytes | None:
    """Removes the first whole frame from `buffer`; returns None while it is incomplete.

    Raises HandshakeError beyond `limit` bytes.
    """
    if len(buffer) < _LENGTH.size:
        return None
    end = _LENGTH.size + _checked_length(buffer[: _LENGTH.size], limit)
    if len(buffer) < end:
        return None
    payload = bytes(buffer[_LENGTH.size : end])
    del buffer[:end]
    return payload


def send_frame(connection: Connection, payload: bytes, deadline: float) -> None:
    """Sends a frame. Raises like `send_all`."""
    send_all(connection, pack_frame(payload), deadline)


def receive_frame(connection: Connection, deadline: float, limit: int) -> bytes:
    """Receives a frame of at most `limit` bytes.

    Raises like `receive_exactly`, and HandshakeError for a longer frame.
    """
    length = _checked_length(receive_exactly(connection, _LENGTH.size, deadline), limit)
    return receive_exactly(connection, length, deadline)


def printable(text: str, limit: int = 2000) -> str:
    """Makes text from another process fit for display: bounded, and without control characters."""
    shown = text[:limit]
    if shown.isprintable():  # as nearly all of it is: each rank reads the description of every other one
        return shown
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in shown)


def one_line(text: str, limit: int = 2000) -> str:
    """Works like `printable`, and joins lines: text of another process cannot pass for a line of ours."""
    return printable(" ".join(text[:limit].split()), limit)


def _checked_length(prefix: bytes | bytearray, limit: int) -> int:
    length: int = _LENGTH.unpack(prefix)[0]
    if length > limit:
        raise HandshakeError(f"the other side sent a message of {length} bytes where {limit} are allowed")
    return length


def _time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _too_late()
    return left


def _too_late() -> RendezvousTimeout:
    return RendezvousTimeout("the other side did not answer in time")
