"""Serves the connections of a job's processes in one thread, which never blocks on any of them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from sirtaki.runner.rendezvous.address import addresses_of, listen_at, split_addresses
from sirtaki.runner.rendezvous.handshake import begin_handshake
from sirtaki.runner.rendezvous.handshake_connection import HandshakeConnection, close_selector
from sirtaki.runner.rendezvous.job import RENDEZVOUS_RANK, HandshakeError, Identity, Job, LinkKind, Role
from sirtaki.runner.rendezvous.unauthenticated import (
    TOO_SLOW,
    UnauthenticatedConnections,
    handshake_deadline,
)
from sirtaki.runner.rendezvous.wire import pack_frame, take_frame

_WAKE_READ_BYTES = 64 * 1024
CLOSING_SECONDS = 10.0  # for a client to read the last message before its connection is closed


class ServedConnection(HandshakeConnection):
    """One client, which sends frames once it has authenticated."""

    closing = False  # close once everything is sent, and read nothing more

    @property
    def interest(self) -> int:
        return selectors.EVENT_WRITE if self.closing else super().interest

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() >= 0

    def receive_available(self) -> bool:
        """Reads what has arrived, and what TLS holds; returns False at the end of the stream."""
        alive = self.receive()
        while alive and self.has_unread:
            unread = len(self.incoming)
            alive = self.receive()
            if len(self.incoming) == unread:  # an incomplete TLS record
                break
        return alive


class ConnectionServer(ABC):
    """Listens at one address or several (separated by commas) as the rendezvous of `job`, until it is closed.

    Port 0 lets the operating system choose. `address` is the address for clients: of all interfaces if the
    server listens on all, or of the named `interfaces`.

    It listens from the constructor on, so that a launcher can fork its ranks before there is a thread; the
    thread runs from `start()` to `close()`; without `start()`, its owner calls `poll`. Raises
    RendezvousError if it cannot listen at `address`.
    """

    def __init__(self, name: str, address: str, job: Job, interfaces: Sequence[str] = ()) -> None:
        self.job = job
        self._listening = [listen_at(one, job.key) for one in split_addresses(address)]
        reachable = [one for listening in self._listening for one in addresses_of(listening, interfaces)]
        self.address = ",".join(dict.fromkeys(reachable))
        self._unauthenticated = UnauthenticatedConnections[ServedConnection](self._reject)  # yet to join
        self._closing: dict[ServedConnection, float] = {}  # to be closed at these moments at the latest
        self._tasks: deque[Callable[[], None]] = deque()  # queued by other threads
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.EpollSelector()
        for listening in self._listening:
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ, partial(self._accept, listening))
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._run_tasks)
        self._running = True
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def close(self) -> None:
        """Ends the server; clients that still wait are notified that the rendezvous is gone."""
        if self._thread.is_alive():
            self._call_soon(self._stop)
            self._thread.join()
        close_selector(self._selector)
        self._wake_sender.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # All methods below run on the server's thread, or on that of its owner.

    @abstractmethod
    def _take(self, connection: ServedConnection, message: bytes) -> None:
        """Handles a message of an authenticated client."""

    @abstractmethod
    def _note_end(self, connection: ServedConnection) -> None:
        """Handles the end of a connection, which is closed."""

    @abstractmethod
    def _note_rejection(self, connection: ServedConnection, text: str) -> None:
        """Reports that a client was rejected."""

    @abstractmethod
    def _limit_of(self, connection: ServedConnection) -> int:
        """Returns the maximum size, in bytes, of an authenticated client's next message."""

    @abstractmethod
    def _expire(self, now: float) -> None:
        """Does what is due."""

    @abstractmethod
    def _next_deadline(self) -> float | None:
        """Returns when (time.monotonic()) something is due."""

    @abstractmethod
    def _finish(self) -> None:
        """Does what has to be done last on the thread."""

    def _call_soon(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are pending
            self._wake_sender.send(b"\0")

    def _run_tasks(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(_WAKE_READ_BYTES)
        while self._tasks:
            self._tasks.popleft()()

    def _stop(self) -> None:
        self._running = False

    def _serve(self) -> None:
        while self._running:
            self.poll(self.time_to_next_deadline())
        self._finish()

    def poll(self, timeout: float | None = 0.0) -> None:
        """Serves what has happened. An owner without the server's thread calls it when `fileno()` is
        readable, and at the next deadline.
        """
        for key, events in self._selector.select(timeout):
            if isinstance(key.data, ServedConnection):
                self._serve_client(key.data, events)
            else:
                key.data()
        now = time.monotonic()
        self._expire(now)
        self._end_overdue(now)
        self._unauthenticated.expire(now, TOO_SLOW)

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there is something to serve."""
        return self._selector.fileno()

    def time_to_next_deadline(self) -> float | None:
        """Returns the seconds until `poll` has to be called, whatever happens; None if nothing is due."""
        moments = (self._unauthenticated.next_deadline, self._next_deadline(), *self._closing.values())
        deadlines = [moment for moment in moments if moment is not None]
        return max(min(deadlines) - time.monotonic(), 0) if deadlines else None

    def _accept(self, listening: socket.socket) -> None:
        client = self._unauthenticated.accept(listening)
        if client is None:
            return
        mine = Identity(RENDEZVOUS_RANK)
        steps = begin_handshake(client, self.job, mine, LinkKind.RENDEZVOUS, Role.ACCEPTS)
        connection = ServedConnection(client, steps, handshake_deadline(client))
        self._unauthenticated.add(connection)
        self._selector.register(client, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _serve_client(self, connection: ServedConnection, events: int) -> None:
        if not connection.is_open:  # closed by an earlier event
            return
        try:
            alive = True
            if events & selectors.EVENT_READ and not connection.closing:
                alive = connection.receive_available()
                connection.authenticate()
                while (message := self._next_message(connection)) is not None:
                    self._take(connection, message)
            if not alive:
                self._drop(connection)
            else:
                self._flush(connection)
        except HandshakeError as error:
            connection.flush_hello()
            self._reject(connection, str(error))
        except OSError:
            self._drop(connection)

    def _next_message(self, connection: ServedConnection) -> bytes | None:
        if connection.closing or not connection.is_open or not connection.is_established:
            return None
        return take_frame(connection.incoming, self._limit_of(connection))

    def _flush(self, connection: ServedConnection) -> None:
        if not connection.is_open:  # closed while its message was handled
            return
        connection.send()
        if connection.closing and not connection.outgoing:
            self._drop(connection)
            return
        self._selector.modify(connection.socket, connection.interest, connection)

    def _flush_or_drop(self, connection: ServedConnection) -> None:
        """Sends what is queued for a client that may be another one than is being served."""
        try:
            self._flush(connection)
        except OSError:
            self._drop(connection)

    def _close_with(self, connection: ServedConnection, message: bytes) -> None:
        """Ends the connection of an authenticated client, whose last message is this one."""
        connection.outgoing += pack_frame(message)
        self._end_soon(connection)

    def _end_soon(self, connection: ServedConnection) -> None:
        """Ends a connection once everything is sent. A client that does not read loses it at a deadline."""
        if not connection.closing:
            connection.closing = True
            self._closing[connection] = time.monotonic() + CLOSING_SECONDS

    def _end_overdue(self, now: float) -> None:
        for connection in [one for one, deadline in self._closing.items() if deadline <= now]:
            self._drop(connection)

    def _reject(self, connection: ServedConnection, reason: str) -> None:
        """Ends a connection without an answer. A client that had to make room may retry: see `connect`."""
        self._drop(connection)
        self._note_rejection(connection, f"{reason} (it came from {connection.origin})")

    def _drop(self, connection: ServedConnection) -> None:
        if not connection.is_open:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._closing.pop(connection, None)
        self._unauthenticated.discard(connection)
        self._note_end(connection)
