"""The server side of `store`: one thread that talks to all ranks and never waits for any of them."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from .address import address_of, listen_at
from .handshake import (
    STORE_RANK,
    BootstrapError,
    Conversation,
    HandshakeError,
    Identity,
    Job,
    LinkKind,
    Role,
    converse,
    pack_frame,
    printable,
    take_frame,
)
from .messages import (
    GATHER,
    JOIN,
    NUMBER,
    PAYLOAD_LIMIT,
    REFUSED,
    REPORT,
    REPORTS,
    REQUEST_LIMIT,
    TEXT_LIMIT,
    TIMED_OUT,
    WELCOME,
    StoreEvent,
    pack_payloads,
    unpack_report,
)
from .rounds import Answer, Rounds

_STRANGER_SECONDS = 10.0  # the time to prove who one is
_STRANGER_LIMIT = 128  # so many may be at it at once; the next one displaces the oldest
_READ_BYTES = 64 * 1024


class _Connection:
    """One client: bytes in, bytes out, without waiting."""

    def __init__(self, client: socket.socket, conversation: Conversation, patience_ends: float) -> None:
        self.socket = client
        self.patience_ends = patience_ends  # until it has joined
        self.peer: Identity | None = None  # who it has proved to be
        self.joined = False
        self.last_words = ""  # how it said that it ended
        self.closing = False  # once everything is sent
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self._conversation = conversation
        hello, self._wanted = next(conversation)
        self.outgoing += hello

    def receive(self) -> bool:
        """Reads what is there; False at the end of the stream."""
        try:
            data = self.socket.recv(_READ_BYTES)
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

    def recognise(self) -> None:
        """Goes on with the handshake as far as the bytes reach. Raises HandshakeError."""
        while self.peer is None and len(self.incoming) >= self._wanted:
            answer = bytes(self.incoming[: self._wanted])
            del self.incoming[: self._wanted]
            try:
                data, self._wanted = self._conversation.send(answer)
                self.outgoing += data
            except StopIteration as finished:
                self.peer = finished.value

    def next_message(self) -> bytes | None:
        return None if self.peer is None else take_frame(self.incoming, REQUEST_LIMIT)


class StoreServer:
    """Serves the all-gathers of `job` at `address` until it is closed.

    It listens from the constructor on, so that a launcher can fork its ranks before there is a thread; the
    thread runs from `start()` to `close()`. `on_event` is called from that thread. An all-gather fails
    `start_timeout` seconds after its first rank came. Raises BootstrapError if it cannot listen at `address`.
    """

    def __init__(
        self,
        address: str,
        job: Job,
        start_timeout: float = 120.0,
        on_event: Callable[[StoreEvent], None] = lambda event: None,
    ) -> None:
        self._job = job
        self._on_event = on_event
        self._rounds = Rounds(job.size, start_timeout)
        self._listening = listen_at(address, job.key)
        self._listening.setblocking(False)
        self.address = address_of(self._listening)
        self._strangers: dict[_Connection, None] = {}  # who has not joined yet, oldest first
        self._ranks: dict[tuple[int, int], _Connection] = {}  # who has, by generation and rank
        self._tasks: deque[Callable[[], None]] = deque()  # from other threads
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell, selectors.EVENT_READ, self._run_tasks)
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="sirtaki rendezvous", daemon=True)

    def start(self) -> StoreServer:
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the server; ranks that still wait are told that the rendezvous is gone."""
        if self._thread.is_alive():
            self._call(self._stop)
            self._thread.join()
        for key in list((self._selector.get_map() or {}).values()):
            cast(socket.socket, key.fileobj).close()
        self._selector.close()
        self._bell_rope.close()

    def __enter__(self) -> StoreServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def rank_ended(self, rank: int, reason: str) -> None:
        """Says that a rank will take part in nothing any more, for example because "it has ended (exit code
        0)".
        """
        self._call(lambda: self._give(self._rounds.depart(rank, math.inf, reason)))

    # All that follows runs on the server's thread.

    def _call(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._bell_rope.send(b"\0")

    def _run_tasks(self) -> None:
        self._bell.recv(_READ_BYTES)
        while self._tasks:
            self._tasks.popleft()()

    def _stop(self) -> None:
        self._open = False

    def _serve(self) -> None:
        while self._open:
            for key, events in self._selector.select(self._time_to_next_deadline()):
                if isinstance(key.data, _Connection):
                    self._serve_client(key.data, events)
                else:
                    key.data()
            now = time.monotonic()
            self._give(self._rounds.expire(now))
            for stranger in [s for s in self._strangers if s.patience_ends <= now]:
                self._turn_away(stranger, f"it did not prove who it is within {_STRANGER_SECONDS:g} s")

    def _time_to_next_deadline(self) -> float | None:
        deadlines = [stranger.patience_ends for stranger in list(self._strangers)[:1]]
        if (deadline := self._rounds.next_deadline()) is not None:
            deadlines.append(deadline)
        return max(min(deadlines) - time.monotonic(), 0) if deadlines else None

    def _accept(self) -> None:
        try:
            client, _ = self._listening.accept()
        except OSError:  # it has gone again, or this process has too many files open: the others go on
            return
        client.setblocking(False)
        if len(self._strangers) >= _STRANGER_LIMIT:
            self._turn_away(
                next(iter(self._strangers)), "too many others came that did not prove who they are"
            )
        conversation = converse(self._job, Identity(STORE_RANK), LinkKind.STORE, Role.ACCEPTS)
        connection = _Connection(client, conversation, time.monotonic() + _STRANGER_SECONDS)
        self._strangers[connection] = None
        self._selector.register(client, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _serve_client(self, connection: _Connection, events: int) -> None:
        if connection.socket.fileno() < 0:  # closed by an event just before
            return
        try:
            alive = True
            if events & selectors.EVENT_READ and not connection.closing:
                alive = connection.receive()
                connection.recognise()
                while not connection.closing and (message := connection.next_message()) is not None:
                    self._handle(connection, message)
            if not alive:
                self._drop(connection)
            else:
                self._flush(connection)
        except HandshakeError as error:
            self._turn_away(connection, str(error))
        except OSError:
            self._drop(connection)

    def _flush(self, connection: _Connection) -> None:
        if connection.outgoing:
            connection.send()
        if connection.closing and not connection.outgoing:
            self._drop(connection)
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
        self._selector.modify(connection.socket, interest, connection)

    def _handle(self, connection: _Connection, message: bytes) -> None:
        kind, body = message[:1], message[1:]
        try:
            if kind == JOIN and not connection.joined and len(body) == NUMBER.size:
                self._join(connection, NUMBER.unpack(body)[0])
            elif (
                kind == GATHER
                and connection.joined
                and NUMBER.size <= len(body) <= NUMBER.size + PAYLOAD_LIMIT
            ):
                self._gather(connection, NUMBER.unpack_from(body)[0], body[NUMBER.size :])
            elif kind == REPORT and connection.joined:
                self._note_report(connection, *unpack_report(body))
            else:
                raise BootstrapError("the rendezvous does not understand this message")
        except BootstrapError as error:
            self._refuse(connection, str(error))

    def _join(self, connection: _Connection, size: int) -> None:
        rank, generation = _who(connection)
        if size != self._job.size:
            raise BootstrapError(
                f"rank {rank} says that the job has {size} ranks, but it has {self._job.size}"
            )
        if not 0 <= rank < size:
            raise BootstrapError(
                f"there is no rank {rank} in a job of {size} ranks: they are 0 to {size - 1}"
            )
        if (generation, rank) in self._ranks:
            raise BootstrapError(
                f"two processes claim to be rank {rank}: give each process a rank of its own"
            )
        connection.joined = True
        del self._strangers[connection]
        self._ranks[generation, rank] = connection
        connection.outgoing += pack_frame(WELCOME)

    def _gather(self, connection: _Connection, number: int, payload: bytes) -> None:
        rank, generation = _who(connection)
        answers = self._rounds.contribute((generation, number), rank, payload, time.monotonic())
        if number == 0:
            self._on_event(StoreEvent("arrived", rank, generation))
        self._give(answers)

    def _note_report(self, connection: _Connection, event: str, text: str) -> None:
        if event not in REPORTS:
            raise BootstrapError("the rendezvous does not know this event")
        rank, generation = _who(connection)
        if event == "finished":
            connection.last_words = "has finished"
        elif event != "initialised":
            connection.last_words = f"gave up: {printable(text, 500)}"
        self._on_event(StoreEvent(event, rank, generation, printable(text, TEXT_LIMIT)))

    def _give(self, answers: list[Answer]) -> None:
        for answer in answers:
            generation = answer.place[0]
            if answer.missing:
                text = answer.error
                self._on_event(StoreEvent("overdue", answer.missing[0], generation, text, answer.missing))
            for rank in answer.waiting:
                if connection := self._ranks.get((generation, rank)):
                    connection.outgoing += pack_frame(_message_of(answer))
                    self._flush_or_drop(connection)

    def _flush_or_drop(self, connection: _Connection) -> None:
        try:
            self._flush(connection)
        except OSError:
            self._drop(connection)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        """Ends a connection whose other side has proved who it is: it hears why."""
        connection.outgoing += pack_frame(REFUSED + reason.encode())
        connection.closing = True
        self._report_refusal(connection, reason)

    def _turn_away(self, connection: _Connection, reason: str) -> None:
        """Ends a connection with no word beyond the handshake."""
        with contextlib.suppress(OSError):
            connection.send()
        self._drop(connection)
        self._report_refusal(connection, reason)

    def _report_refusal(self, connection: _Connection, reason: str) -> None:
        peer = connection.peer or Identity(STORE_RANK)
        self._on_event(StoreEvent("refused", peer.rank, peer.generation, reason))

    def _drop(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._strangers.pop(connection, None)
        if connection.joined:
            rank, generation = _who(connection)
            del self._ranks[generation, rank]
            reason = connection.last_words or "has gone (its process ended, or its init failed)"
            self._give(self._rounds.depart(rank, generation, reason))


def _who(connection: _Connection) -> tuple[int, int]:
    peer = connection.peer
    if peer is None:
        raise BootstrapError("it has not proved who it is")
    return peer.rank, peer.generation


def _message_of(answer: Answer) -> bytes:
    if answer.error:
        return (TIMED_OUT if answer.timed_out else REFUSED) + answer.error.encode()
    return pack_payloads(answer.payloads)
