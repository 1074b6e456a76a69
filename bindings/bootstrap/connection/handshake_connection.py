"""A non-blocking connection to a peer that has not yet authenticated."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import selectors
import socket
import struct
from typing import TYPE_CHECKING, cast

from sirtaki.bindings.bootstrap.connection.handshake import CHOSEN, HandshakeSteps
from sirtaki.bindings.bootstrap.connection.interfaces import unmapped_address
from sirtaki.bindings.bootstrap.connection.wire import SendQueue
from sirtaki.bindings.bootstrap.job import HandshakeError, Identity, Role

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection, TlsConnection

OWN_MACHINE = "this machine"  # the source of connections over Unix sockets
_READ_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")


class HandshakeConnection:
    """One accepted connection with non-blocking input and output.

    Reads no byte beyond the handshake until it is complete: the bytes that follow may be for another reader.
    """

    def __init__(
        self,
        connection: socket.socket,
        steps: HandshakeSteps,
        deadline: float,
        role: Role = Role.ACCEPTS,
    ) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.source, self.origin = _origin(connection)  # counted under this network; for messages
        self.deadline = deadline  # time.monotonic(); deadline for the proof
        self.peer: Identity | None = None  # the authenticated identity
        self.has_answered = False  # whether its first message has arrived
        self.incoming = bytearray()
        self.outgoing = SendQueue()
        self._steps = steps
        self._role = role
        self._tls: TlsConnection | None = None  # set once both sides have authenticated
        hello, self._wanted = next(steps)
        self.outgoing += hello

    @property
    def connection(self) -> Connection:
        """Returns the connection for its next user, once `is_established`."""
        return self._tls or self.socket

    @property
    def is_established(self) -> bool:
        """Returns whether the handshake is complete, including TLS's if the connection is encrypted."""
        if self.peer is None:
            return False
        return not self.peer.certificate or (self._tls is not None and self._tls.is_established)

    @property
    def interest(self) -> int:
        """Returns the events to wait for, as a selector's mask."""
        is_writing = self.outgoing or (self._tls and self._tls.wants_write)
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if is_writing else 0)

    @property
    def has_unread(self) -> bool:
        """Returns whether data has arrived that a selector would not report."""
        return self.is_established and self._tls is not None and self._tls.unread > 0

    @property
    def is_complete(self) -> bool:
        """Returns whether the connection is ready for its next user: established, and all sent."""
        return self.is_established and not self.outgoing

    def advance(self) -> bool:
        """Continues the handshake; returns False once the connection is closed. Raises HandshakeError."""
        try:
            is_open = self.receive()
            self.authenticate()
            self.send()
        except OSError:
            return False
        return is_open

    def receive(self) -> bool:
        """Reads available data; False at the end of the stream. Raises HandshakeError if TLS's fails."""
        if self.peer is not None and not self.is_established:
            self._encrypt()
            return True
        wanted = _READ_BYTES if self.peer else self._wanted - len(self.incoming)
        try:
            data = self.connection.recv(wanted)
        except BlockingIOError:
            return True
        self.incoming += data
        return bool(data)

    def send(self) -> None:
        """Writes as much as fits. Raises HandshakeError if TLS's fails."""
        self._flush()
        if self.peer is not None and not self.is_established:
            self._encrypt()

    def read_choice(self) -> bool | None:
        """Returns whether the rank that connects has chosen this connection, which is complete; None: it has
        yet to say so.
        """
        try:
            return self.connection.recv(len(CHOSEN)) == CHOSEN
        except BlockingIOError:
            return None
        except OSError:
            return False

    def hand_over(self) -> Connection:
        """Returns the established connection, set to blocking."""
        self.socket.setblocking(True)
        return self.connection

    def _flush(self) -> None:
        self.outgoing.send(self.connection)

    def flush_hello(self) -> None:
        """Writes as much as fits before this side closes: the hello tells the peer why it is rejected."""
        with contextlib.suppress(OSError):
            self._flush()

    def _encrypt(self) -> None:
        """Continues TLS's handshake, which begins when the first handshake has been sent completely."""
        if self.outgoing or self.peer is None:
            return
        if self._tls is None:
            from sirtaki.bindings.bootstrap.connection.encryption import (  # opens the core
                TlsConnection,
                own_certificate,
            )

            accepts = self._role is Role.ACCEPTS
            self._tls = TlsConnection(self.socket, own_certificate(), self.peer.certificate, accepts)
        try:
            self._tls.run_handshake()
        except HandshakeError as error:
            raise HandshakeError(f"the connection to {self.peer.name} cannot be encrypted: {error}") from None

    def authenticate(self) -> None:
        """Continues the handshake as far as the received bytes allow. Raises HandshakeError."""
        while self.peer is None and len(self.incoming) >= self._wanted:
            answer = bytes(self.incoming[: self._wanted])
            del self.incoming[: self._wanted]
            self.has_answered = True
            try:
                data, self._wanted = self._steps.send(answer)
                self.outgoing += data
            except StopIteration as finished:
                self.peer = finished.value


def close_selector(selector: selectors.BaseSelector) -> None:
    """Closes a selector, and everything that is registered with it."""
    for key in list((selector.get_map() or {}).values()):
        cast(socket.socket, key.fileobj).close()
    selector.close()


def is_trusted_user(connection: socket.socket) -> bool:
    """Returns whether the peer of a Unix socket runs as the same user, or as root."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] in (os.getuid(), 0)


def _origin(connection: socket.socket) -> tuple[str, str]:
    try:
        name = connection.getpeername()
    except OSError:
        return "somewhere", "somewhere"
    if not isinstance(name, tuple):
        return OWN_MACHINE, OWN_MACHINE
    return _network(unmapped_address(name[0])), f"{unmapped_address(name[0])} port {name[1]}"


def _network(address: str) -> str:
    """Returns the part of an address that its owner cannot choose: a host may use an IPv6 /64 (RFC 4291)."""
    number = ipaddress.ip_address(address.split("%")[0])
    if number.version == 4:
        return address
    return str(ipaddress.ip_network((int(number) >> 64 << 64, 64)))
