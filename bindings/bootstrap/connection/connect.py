"""Connects to the right process at any of several addresses, and authenticates it.

All addresses are tried at the same time, as in "Happy Eyeballs" (RFC 8305), and so are their handshakes: a
machine may be known by addresses that are unreachable from here (a container's bridge, another network), or
that belong to a process that accepts and never answers. No address delays the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from sirtaki.bindings.bootstrap.connection.address import (
    is_unix,
    resolve_all,
    split_address,
    unix_path,
    unknown_host_error,
)
from sirtaki.bindings.bootstrap.connection.handshake import (
    HANDSHAKE_SECONDS,
    HandshakeConnection,
    HandshakeSteps,
    close_selector,
)
from sirtaki.bindings.bootstrap.job import HandshakeError, Identity, RendezvousError, RendezvousTimeout, Role

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between attempts to reach a peer that is not listening yet
_ATTEMPT_SECONDS = 5.0  # for all addresses to answer, before they are retried
# Attempts that end with a closed connection: a crowded listener closes some (unauthenticated.py).
_MAX_CLOSED_ATTEMPTS = 3
_CLOSED = (
    "the other side closed the connection: its key or its job is another one (compare SIRTAKI_KEY_FILE and "
    "SIRTAKI_JOB on both)"
)
_CLOSED_IN_TLS = (
    "the other side closed the connection during the TLS handshake: see its output, or look for something "
    "between the two hosts that cuts connections"
)
_CLOSED_PAUSE = 0.2  # seconds after such an attempt


class ClosedEarlyError(HandshakeError):
    """A peer closes each connection before it sends anything, as a crowded listener does."""


BeginHandshake = Callable[[socket.socket], HandshakeSteps]


class Meanwhile(Protocol):
    """Something else to serve while a connection is awaited."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there is something to serve."""

    def serve(self) -> None:
        """Serves what there is, without waiting."""


def connect(
    addresses: Sequence[str],
    begin_handshake: BeginHandshake,
    deadline: float,
    meanwhile: Meanwhile | None = None,
) -> tuple[Connection, Identity]:
    """Connects to the first address that completes the handshake; returns the connection and the peer.

    `begin_handshake` begins the handshake on a connected socket, as `handshake_steps` does. An address
    without a listener, or whose connection queue is full, is retried until the deadline (time.monotonic()). A
    Unix socket that does not exist is not retried: it exists from the beginning or never. `meanwhile` is
    served until then.

    Raises:
        RendezvousTimeout: no peer answers in time.
        RendezvousError: every address that answers is rejected; the text is that of the last rejection.
    """
    pause, closed_attempts = _FIRST_PAUSE, 0
    while True:
        with contextlib.closing(_Attempt(addresses, begin_handshake, meanwhile)) as attempt:
            found = attempt.run(min(deadline, time.monotonic() + _ATTEMPT_SECONDS), deadline)
        if found is not None:
            return found
        if attempt.refusal is not None:
            raise attempt.refusal
        if attempt.closed_early is not None:
            closed_attempts, pause = closed_attempts + 1, _CLOSED_PAUSE
            if closed_attempts == _MAX_CLOSED_ATTEMPTS:
                raise attempt.closed_early
        is_hopeless = all(map(is_unix, addresses)) and not attempt.is_retryable
        if time.monotonic() + pause >= deadline or is_hopeless:
            raise RendezvousTimeout(f"nobody answers at {attempt.failures()}")
        _pause(pause, meanwhile)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _pause(seconds: float, meanwhile: Meanwhile | None) -> None:
    """Sleeps, or serves `meanwhile`, for this long."""
    if meanwhile is None:
        time.sleep(seconds)
        return
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(meanwhile, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0:
            if selector.select(left):
                meanwhile.serve()


class _Attempt:
    """One connection attempt and handshake for each address, all at the same time."""

    def __init__(
        self, addresses: Sequence[str], begin_handshake: BeginHandshake, meanwhile: Meanwhile | None
    ) -> None:
        self.refusal: RendezvousError | None = None  # a peer that answered is not the right one
        self.closed_early: RendezvousError | None = None  # a peer closed the connection during the handshake
        self._begin_handshake = begin_handshake
        self._meanwhile = meanwhile
        self._connecting = 0  # connections in progress
        self._is_queue_full = False  # a listener's queue of connections is full
        self._selector = selectors.DefaultSelector()
        self._failures: dict[str, str] = dict.fromkeys(addresses, "no answer")
        self._handshakes: dict[socket.socket, HandshakeConnection] = {}
        self._connected: list[socket.socket] = []
        if meanwhile is not None:
            self._selector.register(meanwhile, selectors.EVENT_READ)
        for address in addresses:
            self._begin(address)

    @property
    def is_retryable(self) -> bool:
        """Returns whether there is a listener that may answer the next attempt."""
        return self._is_queue_full or self.closed_early is not None

    def run(self, connect_until: float, deadline: float) -> tuple[Connection, Identity] | None:
        """Returns the first connection with a completed handshake, owned by the caller, or None.

        Connecting may take until `connect_until`, handshakes until `deadline`, and over TCP
        HANDSHAKE_SECONDS each.
        """
        while True:
            while self._connected:
                self._start_handshake(self._connected.pop(), deadline)
            now = time.monotonic()
            self._expire(now)
            waits = [pending.deadline for pending in self._handshakes.values()]
            if self._connecting and now < connect_until:
                waits.append(connect_until)
            if not waits:
                return None
            for key, _ in self._selector.select(max(min(waits) - now, 0.001)):
                if key.fileobj is self._meanwhile:
                    self._meanwhile.serve()
                    continue
                connection = cast(socket.socket, key.fileobj)
                if isinstance(key.data, HandshakeConnection):
                    if found := self._serve(connection, key.data):
                        return found
                else:
                    self._connecting -= 1
                    self._selector.unregister(connection)
                    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    self._finish_connect(key.data, connection, code)

    def failures(self) -> str:
        """Lists each address with the reason why there is no connection to it."""
        return ", ".join(f"{address} ({why})" for address, why in self._failures.items())

    def close(self) -> None:
        if self._meanwhile is not None:
            self._selector.unregister(self._meanwhile)
        close_selector(self._selector)
        for connection in self._connected:
            connection.close()

    def _begin(self, address: str) -> None:
        if is_unix(address):
            self._connect(address, socket.AF_UNIX, unix_path(address))
            return
        host, port = split_address(address)
        try:
            candidates = resolve_all(host, port)
        except socket.gaierror as error:
            # A pod's name becomes resolvable some time after the pod has started.
            if error.errno == socket.EAI_AGAIN or "KUBERNETES_SERVICE_HOST" in os.environ:
                self._failures[address] = f"its name is not known yet: {error.strerror}"
                return
            raise unknown_host_error(host, error) from None
        for family, sockaddr in candidates:
            self._connect(address, family, sockaddr)

    def _connect(self, address: str, family: int, sockaddr: str | tuple[str, int]) -> None:
        try:
            connection = socket.socket(family)
        except OSError as error:  # no IPv6 here
            self._failures[address] = error.strerror or str(error)
            return
        connection.setblocking(False)
        code = connection.connect_ex(sockaddr)
        if code == errno.EINPROGRESS:
            self._connecting += 1
            self._selector.register(connection, selectors.EVENT_WRITE, address)
        else:
            self._finish_connect(address, connection, code)

    def _finish_connect(self, address: str, connection: socket.socket, code: int) -> None:
        if code:
            # A Unix socket whose queue is full fails with EAGAIN immediately, and is not connected: unix(7).
            self._is_queue_full |= code == errno.EAGAIN
            self._failures[address] = "its queue is full" if code == errno.EAGAIN else os.strerror(code)
            connection.close()
            return
        self._connected.append(connection)

    def _start_handshake(self, connection: socket.socket, deadline: float) -> None:
        try:
            until = deadline
            if connection.family != socket.AF_UNIX:  # over a Unix socket, silence means a busy machine
                until = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
            pending = HandshakeConnection(connection, self._begin_handshake(connection), until, Role.CONNECTS)
        except RendezvousError as error:
            connection.close()
            self.refusal = error
            return
        except BaseException:
            connection.close()
            raise
        self._handshakes[connection] = pending
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, pending)

    def _serve(
        self, connection: socket.socket, pending: HandshakeConnection
    ) -> tuple[Connection, Identity] | None:
        try:
            is_open = pending.advance()
        except RendezvousError as error:
            pending.flush_hello()
            self.refusal = error
            self._end(connection)
            return None
        if pending.peer is not None and pending.is_complete:
            self._selector.unregister(connection)
            return pending.hand_over(), pending.peer
        if not is_open:
            if pending.has_answered:
                self.refusal = HandshakeError(_CLOSED_IN_TLS if pending.peer else _CLOSED)
            else:
                self.closed_early = ClosedEarlyError(_CLOSED)
            self._end(connection)
            return None
        self._selector.modify(connection, pending.interest, pending)
        return None

    def _expire(self, now: float) -> None:
        for connection, pending in list(self._handshakes.items()):
            if pending.deadline <= now:
                self.refusal = RendezvousTimeout("the other side did not answer in time")
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        del self._handshakes[connection]
        self._selector.unregister(connection)
        connection.close()
