"""The rendezvous of a host's ranks: a thread of their agent, with a single connection to the server.

N ranks on H hosts need H connections to the server then, and an answer crosses the network once for each host
instead of once for each rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

from sirtaki.bindings.bootstrap import messages
from sirtaki.bindings.bootstrap.connection.address import split_addresses
from sirtaki.bindings.bootstrap.connection.connect import ClosedEarlyError
from sirtaki.bindings.bootstrap.connection.unauthenticated import RejectionLog
from sirtaki.bindings.bootstrap.connection.wire import (
    FROM,
    TOKEN_BYTES,
    Frame,
    MessageKind,
    Sender,
    SendQueue,
    printable,
    take_frame,
)
from sirtaki.bindings.bootstrap.job import (
    CALLS,
    COLLECTOR_RANK,
    HandshakeError,
    Identity,
    Job,
    RendezvousError,
    RendezvousTimeout,
)
from sirtaki.bindings.bootstrap.messages import Route
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient, RendezvousGoneError
from sirtaki.bindings.bootstrap.server.clients import ResumableFrames
from sirtaki.bindings.bootstrap.server.connection_server import ConnectionServer, ServedConnection

# Longest time, in seconds, for which a contribution waits for those of the other ranks of the host. It delays
# nothing: an all-gather cannot end without them.
HOLD_SECONDS = 0.1
_ATTEMPT_SECONDS = 10.0  # to connect to the server, before the thread looks whether it has to end
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds between attempts
_CLOSE_SECONDS = 1.0  # for which `close` waits for the thread
_RESUME_SECONDS = 60.0  # for a broken connection to be replaced: less than the server waits for that
_PATIENCE = 0.9  # part of the start timeout: a rank that waits for the collector receives the reason in time
_REFUSAL_SECONDS = 10.0  # during which further ranks receive the same reason
# Bytes of one rank that the server has not confirmed, before nothing more is read from the rank: more than
# what the server receives before it confirms. Each rank has its own share, so none waits for another one's.
RANK_LIMIT = 128 * 1024
_NO_RANK = -1  # the owner of the collector's own messages
_HELD = (MessageKind.JOIN, MessageKind.GATHER)


class RendezvousCollector(ConnectionServer):
    """Takes the connections of the `ranks` ranks of this host at `address`, a Unix socket, and passes their
    messages on to the rendezvous of `job` at `server`, in as few writes as possible.

    Ranks authenticate to the collector as to the server, and the collector authenticates to the server. The
    collector connects when it is started. If that connection breaks, it connects again, and both sides send
    what the other one has not received; meanwhile ranks send into the buffers of their sockets. If the server
    has ended, or cannot be reached, its ranks lose their connections, and the next rank that joins makes it
    connect again. `say` is called from its thread, with a line about a rejected connection, or about a server
    that cannot be reached. Raises RendezvousError if it cannot listen, ValueError if `server` is no address.
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
        self._say = say
        self._count = ranks
        self._start_timeout = start_timeout
        self._rejection_log = RejectionLog(
            lambda text: say(f"the rendezvous on this host reports that it refused a client: {text}")
        )
        self._server: ServerLink | None = None
        # The message for ranks if there is none, and until when it is used.
        self._refusal = Frame(MessageKind.REJECTED), 0.0
        self._next_number = 0
        self._numbers: dict[ServedConnection, int] = {}
        self._clients: dict[int, ServedConnection] = {}
        self._held: list[bytes] = []  # frames for the server
        self._held_until: float | None = None
        self._contributors: set[int] = set()  # clients whose contribution is held
        self._is_draining = False  # whether the server waits for the ends of all clients
        self._calling: set[int] = set()  # clients whose last request the server has yet to answer
        self._resumed_at, self._pause = (
            -math.inf,
            0.0,
        )  # when it last did, and the pause before that, in seconds

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

    def _finish(self) -> None:
        """Announces to the server that this collector and its ranks end."""
        self._release()
        if self._server is not None:
            self._server.say_goodbye()

    def _connect(self) -> None:
        """Connects to the server; otherwise sets the refusal for ranks."""
        found: list[ServerLink] = []
        kind, reason = self._attempt(
            lambda seconds: found.append(ServerLink(self._server_address, self.job, seconds)),
            _PATIENCE * self._start_timeout,
        )
        if kind is not None:
            self._refuse_ranks(kind, reason)
            return
        self._server = found[0]
        self._selector.register(self._server, selectors.EVENT_READ, self._serve_server)

    def _refuse_ranks(self, kind: MessageKind, reason: str) -> None:
        text = f"the agent of this host cannot reach the rendezvous: {reason}"
        self._refusal = Frame.of(kind, text), time.monotonic() + _REFUSAL_SECONDS

    def _resume(self, server: ServerLink) -> None:
        """Connects again after the connection broke; otherwise loses the server.

        The thread does nothing else meanwhile, so that what ranks report waits in their sockets.
        """
        if server is not self._server:
            return
        self._selector.unregister(server)
        server.close()
        self._pause_between_resumptions()
        seconds = min(_RESUME_SECONDS, _PATIENCE * self._start_timeout)
        kind, reason = self._attempt(server.resume, seconds, HandshakeError)
        if kind is not None:
            self._lose(server, f"it could not be replaced within {seconds:g} s: {reason}")
            self._refuse_ranks(kind, reason)
            return
        self._resumed_at = time.monotonic()
        self._held.clear()  # it has been sent with all that the server had not received
        self._contributors.clear()
        self._held_until = None
        self._selector.register(server, server.interest, self._serve_server)
        self._continue_paused()
        # The selector does not report what came with the answer, if it is decrypted already.
        self._call_soon(self._serve_server)

    def _pause_between_resumptions(self) -> None:
        """Waits the longer, the more often a connection breaks as soon as it has been made."""
        is_soon = time.monotonic() - self._resumed_at < 2 * _LONGEST_PAUSE
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE) if is_soon else 0.0
        time.sleep(self._pause)

    def _attempt(
        self,
        attempt: Callable[[float], None],
        seconds: float,
        retried: type[RendezvousError] = ClosedEarlyError,
    ) -> tuple[MessageKind | None, str]:
        """Repeats an attempt to connect, with the seconds that it may take; returns None once it succeeds.

        Otherwise returns the kind of the refusal for ranks, and the reason. Before the deadline, only a
        refusal with a reason is final, or a failed handshake that is not `retried`.
        """
        deadline = time.monotonic() + seconds
        reason, pause = "", _FIRST_PAUSE
        while self._running and (left := deadline - time.monotonic()) > 0:
            try:
                attempt(min(left, _ATTEMPT_SECONDS))
                return None, ""
            except (RendezvousTimeout, RendezvousGoneError, OSError, retried) as error:
                reason = str(error)
            except RendezvousError as error:
                return MessageKind.REJECTED, str(error)
            self._run_tasks()  # it may have been told to end
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return MessageKind.TIMED_OUT, reason

    def _sender_of(self, connection: ServedConnection) -> Sender:
        if connection not in self._numbers:
            return Sender.NEWCOMER
        is_call = connection.peer is not None and connection.peer.channel == CALLS
        return Sender.CALLER if is_call else Sender.RANK

    def _refuse_frame(self, connection: ServedConnection, reason: str) -> None:
        self._close_with(connection, Frame.of(MessageKind.REJECTED, reason))
        self._note_rejection(connection, reason)

    def _is_paused(self, connection: ServedConnection) -> bool:
        number = self._numbers.get(connection)
        if number is None or self._server is None:
            return super()._is_paused(connection)
        has_much = self._server.unconfirmed[number] >= RANK_LIMIT
        return has_much or number in self._calling or super()._is_paused(connection)

    def _take(self, connection: ServedConnection, frame: Frame) -> None:
        if connection not in self._numbers and not self._admit(connection):
            return
        number = self._numbers[connection]
        self._hold(Frame(MessageKind.SAID, payload=frame.pack(), number=number), number)
        if Sender.CALLER in frame.kind.senders:
            self._calling.add(number)
        if frame.kind == MessageKind.GATHER:
            self._contributors.add(number)
        if frame.kind not in _HELD or len(self._contributors) >= self._count:
            self._release()

    def _admit(self, connection: ServedConnection) -> bool:
        """Numbers a rank that joins, and welcomes it; returns False if it was refused."""
        assert connection.peer is not None
        if self._server is None and time.monotonic() >= self._refusal[1]:
            self._connect()
        if self._server is None:
            self._close_with(connection, self._refusal[0])
            return False
        self._unauthenticated.discard(connection)
        number, self._next_number = self._next_number, self._next_number + 1
        self._numbers[connection], self._clients[number] = number, connection
        connection.outgoing += self._server.welcome
        self._hold(messages.pack_arrival(number, connection.peer), number)
        return True

    def _hold(self, frame: Frame, number: int) -> None:
        """Queues a message about a client, which leaves with the next `_release`."""
        if self._server is None:
            return
        packed = frame.pack()
        self._server.keep(packed, number)
        self._held.append(packed)
        if self._held_until is None:
            self._held_until = time.monotonic() + HOLD_SECONDS

    def _release(self) -> None:
        """Sends what is held to the server."""
        data = b"".join(self._held)
        self._held.clear()
        self._contributors.clear()
        self._held_until = None
        if self._server is not None:
            self._server.send(data)
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
        connection, is_open = server.connection, True
        try:
            is_open = server.receive()
        except OSError:
            is_open = False
        try:
            for frame in server.frames():
                self._take_from_server(frame)
        except RendezvousError as error:
            self._lose(server, str(error))
        if server.connection is not connection:  # replaced meanwhile
            return
        if is_open:
            self._flush_server(server)
        else:
            self._resume(server)

    def _take_from_server(self, frame: Frame) -> None:
        kind = frame.kind
        if kind == MessageKind.CONFIRM:
            self._continue_paused()
        elif kind == MessageKind.DELIVER:
            numbers, delivered = messages.unpack_delivery(frame)
            self._calling.difference_update(numbers)
            for client in [self._clients[number] for number in numbers if number in self._clients]:
                client.outgoing += delivered
                self._flush_or_drop(client)
        elif kind == MessageKind.CLOSE:
            if (refused := self._clients.pop(frame.number, None)) is not None:
                self._calling.discard(self._numbers.pop(refused))
                self._end_soon(refused)
                self._flush_or_drop(refused)
        elif kind == MessageKind.FLUSH:
            self._is_draining = True
            self._end_drain()
        elif kind == MessageKind.GOODBYE and self._server is not None:
            self._lose(self._server)
        elif kind == MessageKind.REJECTED:
            raise RendezvousError(printable(frame.text))
        else:
            raise frame.unexpected()

    def _continue_paused(self) -> None:
        """Reads on from ranks that have been paused, unless they still have to wait."""
        for client in list(self._paused):
            self._watch(client)

    def _flush_server(self, server: ServerLink) -> None:
        if server is not self._server:
            return
        try:
            server.flush()
        except OSError:
            self._resume(server)
            return
        self._selector.modify(server, server.interest, self._serve_server)

    def _lose(self, server: ServerLink, reason: str = "") -> None:
        """Ends the connections of all ranks: the server is gone, and so it would be for each of them.

        Says so if it has not ended in order.
        """
        if server is not self._server:
            return
        if reason and self._running:
            self._say(
                "the connection from this host to the rendezvous has ended, and reports of its ranks may be "
                f"lost until their next hvd.init(): {reason}"
            )
        self._server, self._is_draining = None, False
        if server.fileno() >= 0:
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
        self._calling.discard(number)
        if self._server is not None:
            self._hold(Frame(MessageKind.LEFT, number=number), number)
            self._release()
            self._end_drain()

    def _end_drain(self) -> None:
        """Reports to a waiting server that all clients have ended, after all their messages."""
        if self._is_draining and not self._numbers:
            self._is_draining = False
            self._hold(Frame(MessageKind.FLUSHED), _NO_RANK)
            self._release()

    def _note_rejection(self, connection: ServedConnection, text: str) -> None:
        self._rejection_log.add(text)


# ---- A collector's connection to the server, continued by a new connection when it breaks --------------


# Seconds after which the kernel ends the connection if what was sent is not acknowledged: by default it tries
# for a quarter of an hour.
LOST_SECONDS = 20
_READ_BYTES = 64 * 1024
_COLLECTOR = Identity(COLLECTOR_RANK)


class ServerLink:
    """The connection to the server at `address`, which does not block once it is made.

    `welcome` is the frame for ranks that join. Raises as `RendezvousClient.connect`.
    """

    def __init__(self, address: str, job: Job, seconds: float) -> None:
        self._address = address
        self._job = job
        self._token = os.urandom(TOKEN_BYTES)
        self._frames = ResumableFrames()
        self.unconfirmed = Counter[int]()  # bytes of frames that the server has not confirmed, by their owner
        client = RendezvousClient.connect(address, job, _COLLECTOR, seconds, self._token)
        route = Route(job.encrypt, client.own_addresses())
        self.welcome = messages.pack_welcome(client.session, route).pack()
        self._use(client)

    def resume(self, seconds: float) -> None:
        """Connects again, and sends what the server has not received. Raises as the constructor."""
        request = Frame(MessageKind.RESUME, payload=self._token, number=self._frames.received)
        client, answer = RendezvousClient.resume(self._address, self._job, _COLLECTOR, seconds, request)
        try:
            self._confirm(answer.number)
        except BaseException:
            client.close()
            raise
        self._use(client)
        for part in self._frames.unconfirmed():
            self._outgoing += part

    def _use(self, client: RendezvousClient) -> None:
        client.keep_alive(LOST_SECONDS)
        self.connection = client.connection
        self.connection.settimeout(0)
        self._incoming = bytearray()
        self._outgoing = SendQueue()

    @property
    def interest(self) -> int:
        """Returns the events to wait for, as a selector's mask."""
        tls = None if isinstance(self.connection, socket.socket) else self.connection
        is_writing = self._outgoing or (tls is not None and tls.wants_write)
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if is_writing else 0)

    def fileno(self) -> int:
        return self.connection.fileno()

    def receive(self) -> bool:
        """Reads what has arrived; returns False at the end of the stream. Raises OSError if it breaks."""
        with contextlib.suppress(BlockingIOError):
            while data := self.connection.recv(_READ_BYTES):
                self._incoming += data
            return False
        return True

    def frames(self) -> Iterator[Frame]:
        """Yields the frames that have arrived for the collector, including confirmations.

        Raises RendezvousError.
        """
        while (frame := take_frame(self._incoming, FROM[Sender.ROOT], self._job.size)) is not None:
            if frame.kind == MessageKind.CONFIRM:
                self._confirm(frame.number)
            elif frame.kind != MessageKind.GOODBYE:
                self._outgoing += self._frames.note_received(frame)
            yield frame

    def _confirm(self, count: int) -> None:
        for owner, size in self._frames.confirm(count):
            self.unconfirmed[owner] -= size
            if not self.unconfirmed[owner]:
                del self.unconfirmed[owner]

    def keep(self, frame: bytes, owner: int) -> None:
        """Records a frame to be sent now, or soon."""
        self._frames.keep(owner, frame)
        self.unconfirmed[owner] += len(frame)

    def send(self, data: bytes) -> None:
        """Queues frames that are kept."""
        self._outgoing += data

    def flush(self) -> None:
        """Sends as much as fits. Raises OSError if the connection is lost."""
        self._outgoing.send(self.connection)

    def close(self) -> None:
        self.connection.close()

    def say_goodbye(self) -> None:
        """Sends the server the final end of the connection, if there is room."""
        self._outgoing += Frame(MessageKind.GOODBYE).pack()
        with contextlib.suppress(OSError):
            self.flush()
