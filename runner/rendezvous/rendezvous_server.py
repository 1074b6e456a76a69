"""The server side of the rendezvous: one thread that serves all ranks and never blocks on any of them."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from sirtaki.runner.rendezvous import messages
from sirtaki.runner.rendezvous.address import addresses_of, listen_at, split_addresses
from sirtaki.runner.rendezvous.handshake import begin_handshake
from sirtaki.runner.rendezvous.handshake_connection import HandshakeConnection, close_selector
from sirtaki.runner.rendezvous.job import (
    CALLS,
    RENDEZVOUS_RANK,
    HandshakeError,
    Identity,
    Job,
    LinkKind,
    RendezvousError,
    Role,
)
from sirtaki.runner.rendezvous.messages import NUMBER, RankEvent
from sirtaki.runner.rendezvous.rendezvous_state import Answer, RendezvousState
from sirtaki.runner.rendezvous.unauthenticated import (
    TOO_SLOW,
    RejectionLog,
    UnauthenticatedConnections,
    handshake_deadline,
)
from sirtaki.runner.rendezvous.wire import frame_header, pack_frame, printable, take_frame

_WAKE_READ_BYTES = 64 * 1024
_CALLS_GENERATION = -1  # of connections for calls, which belong to none


class _Connection(HandshakeConnection):
    """One client."""

    joined = False
    initialised = False
    rounds = 0  # the number of all-gathers that it has taken part in
    end_report = ""  # its report of its own end
    closing = False  # close once everything is sent

    def next_message(self) -> bytes | None:
        limit = messages.CALL_LIMIT if self.calls and self.joined else messages.REQUEST_LIMIT
        return take_frame(self.incoming, limit) if self.is_established else None

    @property
    def calls(self) -> bool:
        """Returns whether this is the connection over which a rank asks the launcher's service."""
        return self.peer is not None and self.peer.channel == CALLS


class RendezvousServer:
    """Serves the all-gathers of `job` until it is closed, at one address or at several (separated by commas).

    Port 0 lets the operating system choose. `address` is the address for clients: of all interfaces if the
    server listens on all, or of the named `interfaces`.

    It listens from the constructor on, so that a launcher can fork its ranks before there is a thread; the
    thread runs from `start()` to `close()`; without `start()`, its owner calls `poll`. `on_event` is called
    from that thread. An all-gather fails `start_timeout` seconds after its first rank arrived. `on_message`,
    called from that thread with a rank and bytes, receives what clients send with `send_message`. `on_call`,
    called in the same way, answers the requests of `call`; it may raise RendezvousError. Raises
    RendezvousError if it cannot listen at `address`.
    """

    def __init__(
        self,
        address: str,
        job: Job,
        start_timeout: float = 120.0,
        on_event: Callable[[RankEvent], None] = lambda event: None,
        interfaces: Sequence[str] = (),
        on_message: Callable[[int, bytes], None] | None = None,
        on_call: Callable[[int, bytes], bytes] | None = None,
    ) -> None:
        self.job = job
        self._on_message = on_message
        self._on_call = on_call
        self._session = os.urandom(16)
        self._on_event = on_event
        self._state = RendezvousState(job.size, start_timeout)
        self._listening = [listen_at(one, job.key) for one in split_addresses(address)]
        reachable = [one for listening in self._listening for one in addresses_of(listening, interfaces)]
        self.address = ",".join(dict.fromkeys(reachable))
        self._unauthenticated = UnauthenticatedConnections[_Connection](self._reject)  # clients yet to join
        self._rejection_log = RejectionLog(
            lambda text: on_event(RankEvent("refused", RENDEZVOUS_RANK, 0, text))
        )
        self._ranks: dict[tuple[int, int], _Connection] = {}  # clients that have, by generation and rank
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
        self._thread = threading.Thread(target=self._serve, name="sirtaki rendezvous", daemon=True)

    def start(self) -> RendezvousServer:
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the server; ranks that still wait are notified that the rendezvous is gone."""
        if self._thread.is_alive():
            self._call_soon(self._stop)
            self._thread.join()
        close_selector(self._selector)
        self._wake_sender.close()

    def __enter__(self) -> RendezvousServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def rank_ended(self, rank: int, reason: str) -> None:
        """Records that a rank takes part in nothing any more, for example: "it has ended (exit code 0)"."""
        self._call_soon(lambda: self._send_answers(self._state.note_departure(rank, math.inf, reason)))

    def send_message(self, rank: int, payload: bytes) -> None:
        """Sends bytes to a client, as its next message; drops them if it is not connected."""
        self._call_soon(lambda: self._pass_on(rank, payload))

    def is_connected(self, rank: int) -> bool:
        """Returns whether a client has joined and is connected. For servers without a thread only."""
        return (0, rank) in self._ranks

    # All methods below run on the server's thread, or on that of its owner.

    def _pass_on(self, rank: int, payload: bytes) -> None:
        if connection := self._ranks.get((0, rank)):
            self._send(connection, messages.MESSAGE + payload)

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

    def poll(self, timeout: float | None = 0.0) -> None:
        """Serves what has happened. An owner without the server's thread calls it when `fileno()` is
        readable, and at the next deadline.
        """
        for key, events in self._selector.select(timeout):
            if isinstance(key.data, _Connection):
                self._serve_client(key.data, events)
            else:
                key.data()
        now = time.monotonic()
        self._send_answers(self._state.expire(now))
        self._unauthenticated.expire(now, TOO_SLOW)

    def fileno(self) -> int:
        """Returns a descriptor that is readable while there is something to serve."""
        return self._selector.fileno()

    def time_to_next_deadline(self) -> float | None:
        """Returns the seconds until `poll` has to be called, whatever happens; None if nothing is due."""
        moments = (self._unauthenticated.next_deadline, self._state.next_deadline())
        deadlines = [moment for moment in moments if moment is not None]
        return max(min(deadlines) - time.monotonic(), 0) if deadlines else None

    def _accept(self, listening: socket.socket) -> None:
        client = self._unauthenticated.accept(listening)
        if client is None:
            return
        mine = Identity(RENDEZVOUS_RANK)
        steps = begin_handshake(client, self.job, mine, LinkKind.RENDEZVOUS, Role.ACCEPTS)
        connection = _Connection(client, steps, handshake_deadline(client))
        self._unauthenticated.add(connection)
        self._selector.register(client, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _serve_client(self, connection: _Connection, events: int) -> None:
        if connection.socket.fileno() < 0:  # closed by an earlier event
            return
        try:
            alive = True
            if events & selectors.EVENT_READ and not connection.closing:
                alive = connection.receive()
                while alive and connection.has_unread:
                    unread = len(connection.incoming)
                    alive = connection.receive()
                    if len(connection.incoming) == unread:  # an incomplete TLS record
                        break
                connection.authenticate()
                while not connection.closing and (message := connection.next_message()) is not None:
                    self._handle(connection, message)
            if not alive:
                self._drop(connection)
            else:
                self._flush(connection)
        except HandshakeError as error:
            connection.flush_hello()
            self._reject(connection, str(error))
        except OSError:
            self._drop(connection)

    def _flush(self, connection: _Connection) -> None:
        connection.send()
        if connection.closing and not connection.outgoing:
            self._drop(connection)
            return
        self._selector.modify(connection.socket, connection.interest, connection)

    def _handle(self, connection: _Connection, message: bytes) -> None:
        kind, body = message[:1], message[1:]
        try:
            if kind == messages.JOIN and not connection.joined and len(body) == NUMBER.size:
                self._join(connection, NUMBER.unpack(body)[0])
            elif connection.calls:
                self._answer_call(connection, kind, body)
            elif (
                kind == messages.GATHER
                and connection.joined
                and NUMBER.size <= len(body) <= NUMBER.size + messages.PAYLOAD_LIMIT
            ):
                self._gather(connection, NUMBER.unpack_from(body)[0], body[NUMBER.size :])
            elif kind == messages.REPORT and connection.joined:
                self._note_report(connection, *messages.unpack_report(body))
            elif kind == messages.JOIN_FAILED and connection.joined:
                self._note_failure(connection, *messages.unpack_failure(body))
            elif kind == messages.MESSAGE and connection.joined and self._on_message is not None:
                self._on_message(_identity_of(connection)[0], body)
            else:
                raise RendezvousError("the rendezvous does not understand this message")
        except RendezvousError as error:
            self._send_refusal(connection, str(error))

    def _answer_call(self, connection: _Connection, kind: bytes, request: bytes) -> None:
        if kind != messages.CALL or not connection.joined or self._on_call is None:
            raise RendezvousError("the rendezvous does not understand this message")
        answer = self._on_call(_identity_of(connection)[0], request)
        connection.outgoing += pack_frame(messages.CALL + answer)

    def _join(self, connection: _Connection, size: int) -> None:
        rank, generation = _identity_of(connection)
        if size != self.job.size:
            raise RendezvousError(
                f"rank {rank} says that the job has {size} ranks, but it has {self.job.size}"
            )
        if not 0 <= rank < size:
            raise RendezvousError(
                f"there is no rank {rank} in a job of {size} ranks: they are 0 to {size - 1}"
            )
        if (generation, rank) in self._ranks:
            raise RendezvousError(
                f"two processes claim to be rank {rank}: give each process a rank of its own"
            )
        connection.joined = True
        self._unauthenticated.discard(connection)
        self._ranks[generation, rank] = connection
        connection.outgoing += pack_frame(messages.WELCOME + self._session)

    def _gather(self, connection: _Connection, number: int, payload: bytes) -> None:
        rank, generation = _identity_of(connection)
        if number != connection.rounds:
            raise RendezvousError(
                f"two processes claim to be rank {rank}: give each process a rank of its own"
                if number < connection.rounds
                else "the rendezvous does not understand this message"
            )
        connection.rounds += 1
        answers = self._state.contribute((generation, number), rank, payload, time.monotonic())
        if number == 0:
            self._on_event(RankEvent("arrived", rank, generation))
        self._send_answers(answers)

    def _note_report(self, connection: _Connection, event: str, text: str) -> None:
        if event not in messages.REPORTS:
            raise RendezvousError("the rendezvous does not know this event")
        rank, generation = _identity_of(connection)
        connection.initialised = True
        if event == "finished":
            connection.end_report = "has finished"
        elif event != "initialised":
            connection.end_report = f"gave up: {printable(text, 500)}"
        self._on_event(RankEvent(event, rank, generation, printable(text, messages.TEXT_LIMIT)))

    def _note_failure(self, connection: _Connection, culprit: int, text: str) -> None:
        """Handles a rank's report that it cannot join; at fault is itself, or a peer that it has lost."""
        rank, generation = _identity_of(connection)
        text = printable(text, messages.TEXT_LIMIT)
        if not 0 <= culprit < self.job.size:
            raise RendezvousError(f"there is no rank {culprit} in this job")
        if culprit == rank:
            text = f"rank {rank} could not link to the others: {text}"
        if not self._state.has_failed(generation):
            self._on_event(RankEvent("overdue", culprit, generation, text, (culprit,)))
        self._fail_generation(generation, culprit, text)

    def _fail_generation(self, generation: int, culprit: int, text: str) -> None:
        """Notifies all ranks in this init(), whether they wait in an all-gather or for each other."""
        if not self._state.mark_failed(generation, text):
            return
        message = messages.pack_failure(culprit, text)
        for connection in [one for (other, _), one in self._ranks.items() if other == generation]:
            if not connection.initialised:
                self._send(connection, message)

    def _send_answers(self, answers: list[Answer]) -> None:
        for answer in answers:
            generation = answer.key[0]
            if answer.missing:
                kind = "overdue" if answer.timed_out else "departed"
                self._on_event(RankEvent(kind, answer.missing[0], generation, answer.error, answer.missing))
            message = _message_of(answer)
            for rank in answer.waiting:
                if connection := self._ranks.get((generation, rank)):
                    self._send(connection, message)

    def _send(self, connection: _Connection, message: bytes) -> None:
        connection.outgoing += frame_header(len(message))
        connection.outgoing += message
        try:
            self._flush(connection)
        except OSError:
            self._drop(connection)

    def _send_refusal(self, connection: _Connection, reason: str) -> None:
        """Ends the connection of an authenticated peer, and sends it the reason."""
        connection.outgoing += pack_frame(messages.REFUSED + reason.encode())
        connection.closing = True
        self._on_event(RankEvent("refused", *_identity_of(connection), reason))

    def _reject(self, connection: _Connection, reason: str) -> None:
        """Ends a connection without an answer. A client that had to make room may retry: see `connect`."""
        self._drop(connection)
        text = f"{reason} (it came from {connection.origin})"
        if connection.peer is None:
            self._rejection_log.add(text)
        else:
            self._on_event(RankEvent("refused", *_identity_of(connection), text))

    def _drop(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._unauthenticated.discard(connection)
        if connection.joined:
            rank, generation = _identity_of(connection)
            del self._ranks[generation, rank]
            if connection.initialised and not connection.end_report:
                self._on_event(RankEvent("disconnected", rank, generation))
            reason = connection.end_report or "has gone (its process ended, or its init failed)"
            self._send_answers(self._state.note_departure(rank, generation, reason))
            if not connection.initialised and connection.rounds:
                self._fail_generation(generation, rank, f"rank {rank} {reason}")


def _identity_of(connection: _Connection) -> tuple[int, int]:
    peer = connection.peer
    if peer is None:
        raise RendezvousError("it has not authenticated")
    return peer.rank, _CALLS_GENERATION if connection.calls else peer.generation


def _message_of(answer: Answer) -> bytes:
    if answer.error:
        return (messages.TIMED_OUT if answer.timed_out else messages.REFUSED) + answer.error.encode()
    return messages.pack_payloads(answer.payloads)
