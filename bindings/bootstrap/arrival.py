"""A connection whose other side has yet to prove who it is; nobody waits for it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct

from .handshake import Conversation, Identity
from .interfaces import plain

_READ_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")


class Arrival:
    """One accepted connection: bytes in, bytes out, without waiting.

    Reads not a byte beyond the handshake until it is over: what follows may be for somebody else.
    """

    def __init__(self, connection: socket.socket, conversation: Conversation, patience_ends: float) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.source, self.origin = _origin(connection)  # the network it is counted under; for messages
        self.patience_ends = patience_ends  # time.monotonic(), for the proof
        self.peer: Identity | None = None  # who it has proved to be
        self.has_answered = False  # its first message has come
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self._conversation = conversation
        hello, self._wanted = next(conversation)
        self.outgoing += hello

    def receive(self) -> bool:
        """Reads what is there; False at the end of the stream."""
        wanted = _READ_BYTES if self.peer else self._wanted - len(self.incoming)
        try:
            data = self.socket.recv(wanted)
        except BlockingIOError:
            return True
        self.incoming += data
        return bool(data)

    def send(self) -> None:
        """Writes what fits."""
        try:
            del self.outgoing[: self.socket.send(self.outgoing)]
        except BlockingIOError:
            return

    def send_hello_to_refused(self) -> None:
        """Writes what fits before this side closes: the hello tells the other side why it is refused."""
        with contextlib.suppress(OSError):
            self.send()

    def recognise(self) -> None:
        """Goes on with the handshake as far as the bytes reach. Raises HandshakeError."""
        while self.peer is None and len(self.incoming) >= self._wanted:
            answer = bytes(self.incoming[: self._wanted])
            del self.incoming[: self._wanted]
            self.has_answered = True
            try:
                data, self._wanted = self._conversation.send(answer)
                self.outgoing += data
            except StopIteration as finished:
                self.peer = finished.value


def is_ours(connection: socket.socket) -> bool:
    """Whether the other side of a Unix socket runs as the same user, or as root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (os.getuid(), 0)


def _origin(connection: socket.socket) -> tuple[str, str]:
    try:
        name = connection.getpeername()
    except OSError:
        return "somewhere", "somewhere"
    if not isinstance(name, tuple):
        return "this machine", "this machine"
    return _network(plain(name[0])), f"{plain(name[0])} port {name[1]}"


def _network(address: str) -> str:
    """The part of an address that its owner cannot choose: a host may use all of an IPv6 /64 (RFC 4291)."""
    number = ipaddress.ip_address(address.split("%")[0])
    if number.version == 4:
        return address
    return str(ipaddress.ip_network((int(number) >> 64 << 64, 64)))
