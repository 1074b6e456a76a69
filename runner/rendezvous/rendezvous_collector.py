"""The rendezvous as the ranks of one host see it: their agent's thread, with one connection to the server.

N ranks on H hosts need H connections to the server then, and an answer crosses the network once for each host
instead of once for each rank.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

from sirtaki.runner.rendezvous import messages
from sirtaki.runner.rendezvous.address import split_addresses
from sirtaki.runner.rendezvous.connect import ClosedEarlyError
from sirtaki.runner.rendezvous.connection_server import ConnectionServer, ServedConnection
from sirtaki.runner.rendezvous.job import (
    CALLS,
    COLLECTOR_RANK,
    Identity,
    Job,
    RendezvousError,
    RendezvousTimeout,
)
from sirtaki.runner.rendezvous.messages import NUMBER, Route
from sirtaki.runner.rendezvous.rendezvous_client import RendezvousClient, RendezvousGoneError
from sirtaki.runner.rendezvous.send_queue import SendQueue
from sirtaki.runner.rendezvous.unauthenticated import RejectionLog
from sirtaki.runner.rendezvous.wire import pack_frame, take_frame

# Longest time, in seconds, for which a contribution waits for those of the other ranks of the host. It delays
# nothing: an all-gather cannot end without them.
HOLD_SECONDS = 0.1
_ATTEMPT_SECONDS = 10.0  # to connect to the server, before the thread looks whether it has to end
_PAUSE_SECONDS = 0.1  # between attempts
_CLOSE_SECONDS = 1.0  # for which `close` waits for the thread
_PATIENCE = 0.9  # part of the start timeout: a rank that waits for the collector receives the reason in time
_REFUSAL_SECONDS = 10.0  # during which further ranks receive the same reason
_READ_BYTES = 64 * 1024
_HELD = (messages.JOIN, messages.GATHER)


class RendezvousCollector(ConnectionServer):
    """Takes the connections of the `ranks` ranks of this host at `address`, a Unix socket, and passes their
    messages on to the rendezvous of `job` at `server`, in as few writes as possible.

    Ranks authenticate to the collector as to the server, and the collector authenticates to the server. The
    collector connects when it is started. If it loses the server, its ranks lose their connections, and the
    next rank that joins makes it connect again. `say` is called from its thread, with a line about a rejected
    connection. Raises RendezvousError if it cannot listen, ValueError if `server` is no address.
    """

    def __init__(
        self,
        address: str,
        job: Job,
        server: str,
        ranks: int,
        start_timeout: float,
        say: Callable[[str], None],
    ) -> None:
        super().__init__("sirtaki collector", address, job)
        split_addresses(server)  # raises ValueError here instead of in the thread
        self._server_address = server
        self._count = ranks
        self._start_timeout = start_timeout
        self._rejection_log = RejectionLog(
            lambda text: say(f"the rendezvous on this host reports that it refused a client: {text}")
        )
        self._server: _ServerConnection | None = None
        self._welcome = b""  # for ranks, once there is a connection to the server
        self._refusal = b"", 0.0  # the message for ranks if there is none, and until when it is used
        self._next_number = 0
        self._numbers: dict[ServedConnection, int] = {}
        self._clients: dict[int, ServedConnection] = {}
        self._held: list[bytes] = []  # frames for the server
        self._held_until: float | None = None
        self._contributors: set[int] = set()  # clients whose contribution is held

    def start(self) -> RendezvousCollector:
        self._thread.start()
        return self

    def __enter__(self) -> RendezvousCollector:
        return self.start()

    def close(self) -> None:
        """Ends the collector. Does not wait for an attempt to connect: the thread ends after it."""
        if self._thread.is_alive():
            self._call_soon(self._stop)
            self._thread.join(_CLOSE_SECONDS)
            if self._thread.is_alive():
                return
        super().close()
        if self._server is not None:
            self._server.close()

    # All methods below run on the collector's thread.

    def _serve(self) -> None:
        self._connect()
        super()._serve()

    def _connect(self) -> None:
        """Connects to the server; otherwise sets the refusal for ranks.

        Only a refusal with a reason, such as another key, is final before the deadline.
        """
        deadline = time.monotonic() + _PATIENCE * self._start_timeout
        kind, reason = messages.TIMED_OUT, ""
        while self._running and (left := deadline - time.monotonic()) > 0:
            try:
                self._open(min(left, _ATTEMPT_SECONDS))
                return
            except (RendezvousTimeout, ClosedEarlyError, RendezvousGoneError, OSError) as error:
                reason = str(error)
            except RendezvousError as error:
                kind, reason = messages.REFUSED, str(error)
                break
            self._run_tasks()  # it may have been told to end
            time.sleep(_PAUSE_SECONDS)
        text = f"the agent of this host cannot reach the rendezvous: {reason}"
        self._refusal = kind + text.encode(errors="replace"), time.monotonic() + _REFUSAL_SECONDS

    def _open(self, seconds: float) -> None:
        mine = Identity(COLLECTOR_RANK)
        client = RendezvousClient.connect(self._server_address, self.job, mine, seconds)
        client.keep_alive()
        route = Route(self.job.encrypt, client.own_addresses())
        self._welcome = messages.pack_welcome(client.session, route)
        self._server = _ServerConnection(client)
        self._selector.register(self._server, selectors.EVENT_READ, self._serve_server)

    def _limit_of(self, connection: ServedConnection) -> int:
        is_call = connection.peer is not None and connection.peer.channel == CALLS
        return messages.CALL_LIMIT if is_call and connection in self._numbers else messages.REQUEST_LIMIT

    def _take(self, connection: ServedConnection, message: bytes) -> None:
        if connection not in self._numbers and not self._admit(connection, message):
            return
        number, kind = self._numbers[connection], message[:1]
        self._hold(messages.PASSED + NUMBER.pack(number) + message)
        if kind == messages.GATHER:
            self._contributors.add(number)
        if kind not in _HELD or len(self._contributors) >= self._count:
            self._release()

    def _admit(self, connection: ServedConnection, message: bytes) -> bool:
        """Numbers a rank that joins, and welcomes it; returns False if it was refused."""
        assert connection.peer is not None
        if message[:1] != messages.JOIN:
            self._close_with(connection, messages.REFUSED + b"a rank has to join the rendezvous first")
            return False
        if self._server is None and time.monotonic() >= self._refusal[1]:
            self._connect()
        if self._server is None:
            self._close_with(connection, self._refusal[0])
            return False
        self._unauthenticated.discard(connection)
        number, self._next_number = self._next_number, self._next_number + 1
        self._numbers[connection], self._clients[number] = number, connection
        connection.outgoing += pack_frame(self._welcome)
        self._hold(messages.pack_arrival(number, connection.peer))
        return True

    def _hold(self, message: bytes) -> None:
        self._held.append(pack_frame(message))
        if self._held_until is None:
            self._held_until = time.monotonic() + HOLD_SECONDS

    def _release(self) -> None:
        """Sends what is held to the server."""
        data = b"".join(self._held)
        self._held.clear()
        self._contributors.clear()
        self._held_until = None
        if self._server is not None:
            self._server.outgoing += data
            self._flush_server(self._server)

    def _expire(self, now: float) -> None:
        if self._held_until is not None and self._held_until <= now:
            self._release()

    def _next_deadline(self) -> float | None:
        return self._held_until

    def _serve_server(self) -> None:
        server = self._server
        if server is None:
            return
        try:
            is_open = server.receive()
            limit = messages.delivered_limit(self.job.size)
            while (message := take_frame(server.incoming, limit)) is not None:
                self._take_from_server(message)
        except (OSError, RendezvousError):
            is_open = False
        if is_open:
            self._flush_server(server)
        else:
            self._lose(server)

    def _take_from_server(self, message: bytes) -> None:
        kind, body = message[:1], message[1:]
        if kind == messages.DELIVER:
            numbers, delivered = messages.unpack_delivery(body)
            frame = pack_frame(delivered)
            for client in [self._clients[number] for number in numbers if number in self._clients]:
                client.outgoing += frame
                self._flush_or_drop(client)
        elif kind == messages.CLOSE and len(body) == NUMBER.size:
            if (refused := self._clients.pop(NUMBER.unpack(body)[0], None)) is not None:
                del self._numbers[refused]
                self._end_soon(refused)
                self._flush_or_drop(refused)
        else:
            raise RendezvousError("the rendezvous sent a malformed answer")

    def _flush_server(self, server: _ServerConnection) -> None:
        try:
            server.outgoing.send(server.connection)
        except OSError:
            self._lose(server)
            return
        if server is self._server:
            self._selector.modify(server, server.interest, self._serve_server)

    def _lose(self, server: _ServerConnection) -> None:
        """Ends the connections of all ranks: the server is gone, and so it would be for each of them."""
        if server is not self._server:
            return
        self._server = None
        self._selector.unregister(server)
        server.close()
        self._held.clear()
        self._release()
        for client in list(self._numbers):
            self._drop(client)

    def _note_end(self, connection: ServedConnection) -> None:
        number = self._numbers.pop(connection, None)
        if number is None:
            return
        del self._clients[number]
        if self._server is not None:
            self._hold(messages.LEFT + NUMBER.pack(number))
            self._release()

    def _note_rejection(self, connection: ServedConnection, text: str) -> None:
        self._rejection_log.add(text)


class _ServerConnection:
    """The connection to the server, which does not block."""

    def __init__(self, client: RendezvousClient) -> None:
        self.connection = client.connection
        self.connection.settimeout(0)
        self.incoming = bytearray()
        self.outgoing = SendQueue()

    @property
    def interest(self) -> int:
        """Returns the events to wait for, as a selector's mask."""
        tls = None if isinstance(self.connection, socket.socket) else self.connection
        is_writing = self.outgoing or (tls is not None and tls.wants_write)
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if is_writing else 0)

    def receive(self) -> bool:
        """Reads what has arrived; returns False at the end of the stream. Raises OSError if it breaks."""
        with contextlib.suppress(BlockingIOError):
            while data := self.connection.recv(_READ_BYTES):
                self.incoming += data
            return False
        return True

    def fileno(self) -> int:
        return self.connection.fileno()

    def close(self) -> None:
        self.connection.close()
