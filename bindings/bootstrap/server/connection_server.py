"""Serves the connections of a job's processes in a single thread that never blocks on any of them."""

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

from sirtaki.bindings.bootstrap.connection.address import addresses_of, listen_at, split_addresses
from sirtaki.bindings.bootstrap.connection.handshake import (
    HandshakeConnection,
    begin_handshake,
    close_selector,
)
from sirtaki.bindings.bootstrap.connection.unauthenticated import (
    TOO_SLOW,
    UnauthenticatedConnections,
    handshake_deadline,
)
from sirtaki.bindings.bootstrap.connection.wire import FROM, Frame, Sender, WireError, take_frame
from sirtaki.bindings.bootstrap.job import RENDEZVOUS_RANK, HandshakeError, Identity, Job, LinkKind, Role

_WAKE_READ_BYTES = 64 * 1024
# Bytes that wait for a client before nothing more is read from it: one that asks without reading the answers.
QUEUE_LIMIT = 16 * 1024 * 1024
CLOSING_SECONDS = 10.0  # for a client to read the last message before its connection is closed


class ServedConnection(HandshakeConnection):
    """One client, which sends frames once it has authenticated."""

    closing = False  # close once everything is sent, and read nothing more
    has_ended = False  # all that the client has sent is in `incoming`
    is_broken = False  # nothing can be sent any more, but what the client has sent before may still be read
    is_watched = True  # whether the server's selector knows it

    @property
    def interest(self) -> int:
        if self.closing:
            return selectors.EVENT_WRITE
        return selectors.EVENT_READ if self.is_broken else super().interest

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
    """Listens at the comma-separated addresses as the rendezvous of `job`, until it is closed.

    Port 0 lets the operating system choose. `address` is the address for clients: of all interfaces if the
    server listens on all, or of the named `interfaces`.

    It listens from the constructor on, so that a launcher can fork its ranks before there is a thread; the
    thread runs from `start()` to `close()`; without `start()`, its owner calls `poll`. Raises
    RendezvousError if it cannot listen at `address`.
    """

    def __init__(self, name: str, address: str, job: Job, interfaces: Sequence[str] = ()) -> None:
        self.job = job
        self._listening = [listen_at(place, job.key) for place in split_addresses(address)]
        reachable = [
            address for listening in self._listening for address in addresses_of(listening, interfaces)
        ]
        self.address = ",".join(dict.fromkeys(reachable))
        self._unauthenticated = UnauthenticatedConnections[ServedConnection](self._reject)  # yet to join
        self._closing: dict[ServedConnection, float] = {}  # to be closed at these moments at the latest
        self._paused: dict[ServedConnection, None] = {}  # from which nothing is read at the moment
        self._ready: dict[ServedConnection, None] = {}  # that are no longer paused, and may have messages
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
        for connection in self._paused:
            connection.socket.close()
        self._wake_sender.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # All methods below run on the server's thread, or on that of its owner.

    @abstractmethod
    def _take(self, connection: ServedConnection, frame: Frame) -> None:
        """Handles a message of an authenticated client."""

    @abstractmethod
    def _refuse_frame(self, connection: ServedConnection, reason: str) -> None:
        """Ends the connection of an authenticated client that has sent malformed data."""

    @abstractmethod
    def _note_end(self, connection: ServedConnection) -> None:
        """Handles the end of a connection, which is closed."""

    @abstractmethod
    def _note_rejection(self, connection: ServedConnection, text: str) -> None:
        """Reports that a client was rejected."""

    @abstractmethod
    def _sender_of(self, connection: ServedConnection) -> Sender:
        """Returns the sender of an authenticated client's next message."""

    @abstractmethod
    def _expire(self, now: float) -> None:
        """Performs all due actions of the subclass."""

    @abstractmethod
    def _next_deadline(self) -> float | None:
        """Returns when (time.monotonic()) something is due."""

    @abstractmethod
    def _finish(self) -> None:
        """Performs the thread's last actions."""

    def _is_paused(self, connection: ServedConnection) -> bool:
        """Returns whether to read and handle no message of a client at the moment."""
        return connection.outgoing.size > QUEUE_LIMIT

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
        ready, self._ready = self._ready, {}
        for connection in ready:
            self._serve_client(connection, selectors.EVENT_READ)
        now = time.monotonic()
        self._expire(now)
        self._end_overdue(now)
        self._unauthenticated.expire(now, TOO_SLOW)

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there is something to serve."""
        return self._selector.fileno()

    def time_to_next_deadline(self) -> float | None:
        """Returns the seconds until `poll` has to be called, whatever happens; None if nothing is due."""
        if self._ready:
            return 0.0
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
            if events & selectors.EVENT_READ and not connection.closing:
                self._receive(connection)
                while (frame := self._next_frame(connection)) is not None:
                    self._take(connection, frame)
            if connection.has_ended and not self._is_paused(connection):
                self._drop(connection)
        except HandshakeError as error:
            connection.flush_hello()
            self._reject(connection, str(error))
        else:
            self._flush_or_drop(connection)

    def _receive(self, connection: ServedConnection) -> None:
        """Reads what has arrived, unless the client is paused. Raises HandshakeError."""
        if self._is_paused(connection) or connection.has_ended:
            return
        try:
            connection.has_ended = not connection.receive_available()
        except OSError:
            connection.has_ended = True
        connection.authenticate()

    def _next_frame(self, connection: ServedConnection) -> Frame | None:
        if connection.closing or not connection.is_open or not connection.is_established:
            return None
        if self._is_paused(connection):
            self._paused[connection] = (
                None  # the rest is served later, also if the pause ends before it is watched
            )
            return None
        try:
            return take_frame(connection.incoming, FROM[self._sender_of(connection)])
        except WireError as error:
            self._refuse_frame(connection, str(error))
            return None

    def _flush_or_drop(self, connection: ServedConnection) -> None:
        """Sends a client's queued data; the client need not be the client being served.

        If that fails, a client that has authenticated is dropped once all is read that it has sent: its last
        report may be among it.
        """
        if not connection.is_open:  # closed while its message was handled
            return
        try:
            if not connection.is_broken:
                connection.send()
        except HandshakeError as error:
            self._reject(connection, str(error))
            return
        except OSError:
            connection.is_broken = True
        if connection.is_broken and (connection.closing or not connection.is_established):
            self._drop(connection)
            return
        if connection.is_broken:
            connection.outgoing.clear()
        if connection.closing and not connection.outgoing:
            self._drop(connection)
            return
        self._watch(connection)

    def _watch(self, connection: ServedConnection) -> None:
        """Registers with the selector the events that the server waits for.

        A paused client is watched for writing at most. A client without such events is unregistered: the
        selector would report its hang-up forever.
        """
        interest = connection.interest
        if self._is_paused(connection):
            interest &= ~selectors.EVENT_READ
            self._paused[connection] = None
        elif connection in self._paused:
            del self._paused[connection]
            self._ready[connection] = None
        if connection.is_watched and interest:
            self._selector.modify(connection.socket, interest, connection)
        elif connection.is_watched:
            self._selector.unregister(connection.socket)
        elif interest:
            self._selector.register(connection.socket, interest, connection)
        connection.is_watched = interest != 0

    def _close_with(self, connection: ServedConnection, frame: Frame) -> None:
        """Sends an authenticated client a last message, and ends the connection."""
        connection.outgoing += frame.pack()
        self._end_soon(connection)

    def _end_soon(self, connection: ServedConnection) -> None:
        """Ends a connection once everything is sent. A client that does not read loses it at a deadline."""
        if not connection.closing:
            connection.closing = True
            self._closing[connection] = time.monotonic() + CLOSING_SECONDS

    def _end_overdue(self, now: float) -> None:
        for connection in [item for item, deadline in self._closing.items() if deadline <= now]:
            self._drop(connection)

    def _reject(self, connection: ServedConnection, reason: str) -> None:
        """Ends a connection without an answer. A client that had to make room may retry: see `connect`."""
        self._drop(connection)
        self._note_rejection(connection, f"{reason} (it came from {connection.origin})")

    def _drop(self, connection: ServedConnection) -> None:
        if not connection.is_open:
            return
        if connection.is_watched:
            self._selector.unregister(connection.socket)
        connection.socket.close()
        self._paused.pop(connection, None)
        self._ready.pop(connection, None)
        self._closing.pop(connection, None)
        self._unauthenticated.discard(connection)
        self._note_end(connection)
