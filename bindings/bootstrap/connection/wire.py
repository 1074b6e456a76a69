"""Bytes on a connection with a deadline: whole messages, and frames with their length in front."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from sirtaki.bindings.bootstrap.job import HandshakeError, RendezvousTimeout

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection

_LENGTH = struct.Struct("!I")


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
