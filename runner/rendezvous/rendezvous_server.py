"""The server side of the rendezvous: one thread that serves all ranks and never blocks on any of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence

from sirtaki.runner.rendezvous import messages
from sirtaki.runner.rendezvous.connection_server import ConnectionServer, ServedConnection
from sirtaki.runner.rendezvous.job import COLLECTOR_RANK, RENDEZVOUS_RANK, Job, RendezvousError, name_of
from sirtaki.runner.rendezvous.messages import NUMBER, RankEvent
from sirtaki.runner.rendezvous.participant import Participant
from sirtaki.runner.rendezvous.rendezvous_state import Answer, RendezvousState
from sirtaki.runner.rendezvous.unauthenticated import RejectionLog
from sirtaki.runner.rendezvous.wire import frame_header, pack_frame, printable

_OWN = -1  # the number of a client with a connection of its own; collectors count from 0
_PER_RANK = 4  # connections behind a collector: for a world, for calls, and those that end meanwhile
_UNKNOWN = "the rendezvous does not understand this message"
_GONE = "has gone (its process ended, or its init failed)"
_HOST_GONE = "has gone (the connection to the agent of its host ended)"


class RendezvousServer(ConnectionServer):
    """Serves the all-gathers of `job`, as a `ConnectionServer`.

    A client is a rank, or the collector of a host: a connection on which the messages of several ranks come,
    and to which an answer for several of them goes once.

    `on_event` is called from the server's thread. An all-gather fails `start_timeout` seconds after its first
    rank arrived. `on_message`, called from that thread with a rank and bytes, receives what clients send with
    `send_message`. `on_call`, called in the same way, answers the requests of `call`; it may raise
    RendezvousError. Only the server of a job whose ranks an agent starts `accepts_collectors`.
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
        accepts_collectors: bool = False,
    ) -> None:
        super().__init__("sirtaki rendezvous", address, job, interfaces)
        self._on_message = on_message
        self._on_call = on_call
        self._accepts_collectors = accepts_collectors
        self._session = os.urandom(messages.SESSION_BYTES)
        self._on_event = on_event
        self._state = RendezvousState(job.size, start_timeout)
        self._rejection_log = RejectionLog(
            lambda text: on_event(RankEvent("refused", RENDEZVOUS_RANK, 0, text))
        )
        self._clients: dict[ServedConnection, dict[int, Participant]] = {}  # by the collector's number
        self._ranks: dict[tuple[int, int], Participant] = {}  # that have joined, by generation and rank

    def start(self) -> RendezvousServer:
        self._thread.start()
        return self

    def __enter__(self) -> RendezvousServer:
        return self.start()

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
        if one := self._ranks.get((0, rank)):
            self._deliver([one], messages.MESSAGE + payload)

    def _expire(self, now: float) -> None:
        self._send_answers(self._state.expire(now))

    def _next_deadline(self) -> float | None:
        return self._state.next_deadline()

    def _limit_of(self, connection: ServedConnection) -> int:
        if connection not in self._clients:
            return messages.REQUEST_LIMIT
        own = self._clients[connection].get(_OWN)
        if own is None and _is_collector(connection):
            return messages.COLLECTED_LIMIT
        return messages.REQUEST_LIMIT if own is None else own.limit

    def _take(self, connection: ServedConnection, message: bytes) -> None:
        if _is_collector(connection):
            try:
                self._take_collected(connection, message)
            except RendezvousError as error:
                self._close_with(connection, messages.REFUSED + str(error).encode())
                self._on_event(RankEvent("refused", RENDEZVOUS_RANK, 0, str(error)))
            return
        peer = connection.peer
        assert peer is not None
        clients = self._clients.setdefault(connection, {})
        self._handle(clients.setdefault(_OWN, Participant(connection, peer)), message)

    def _take_collected(self, connection: ServedConnection, message: bytes) -> None:
        """Handles a message of a host's collector. One from a client that was refused is dropped."""
        kind, number, body = messages.unpack_collected(message)
        clients = self._clients.get(connection)
        if not self._accepts_collectors:
            raise RendezvousError(
                "the agent of a host connected, but ranks connect to this rendezvous directly"
            )
        if clients is None and kind == messages.JOIN and number == self.job.size and not body:
            self._clients[connection] = {}
            self._unauthenticated.discard(connection)
            connection.outgoing += pack_frame(messages.pack_welcome(self._session))
        elif clients is None:
            raise RendezvousError(_UNKNOWN)
        elif kind == messages.ARRIVED and number not in clients:
            if len(clients) >= _PER_RANK * self.job.size:
                raise RendezvousError(f"more than {len(clients)} processes of a host have connected")
            clients[number] = Participant(connection, messages.unpack_identity(body), number)
        elif kind == messages.PASSED:
            if (one := clients.get(number)) and len(body) > one.limit:
                raise RendezvousError(f"{name_of(one.rank)} sent a message of {len(body)} bytes: too many")
            if one:
                self._handle(one, body)
        elif kind == messages.LEFT:
            if one := clients.pop(number, None):
                self._depart(one, _GONE)
        else:
            raise RendezvousError(_UNKNOWN)

    def _handle(self, one: Participant, message: bytes) -> None:
        kind, body = message[:1], message[1:]
        try:
            if kind == messages.JOIN and not one.joined and len(body) == NUMBER.size:
                self._join(one, NUMBER.unpack(body)[0])
            elif one.calls:
                self._answer_call(one, kind, body)
            elif (
                kind == messages.GATHER
                and one.joined
                and NUMBER.size <= len(body) <= NUMBER.size + messages.PAYLOAD_LIMIT
            ):
                self._gather(one, NUMBER.unpack_from(body)[0], body[NUMBER.size :])
            elif kind == messages.REPORT and one.joined:
                self._note_report(one, *messages.unpack_report(body))
            elif kind == messages.JOIN_FAILED and one.joined:
                self._note_failure(one, *messages.unpack_failure(body))
            elif kind == messages.MESSAGE and one.joined and self._on_message is not None:
                self._on_message(one.rank, body)
            else:
                raise RendezvousError(_UNKNOWN)
        except RendezvousError as error:
            self._refuse(one, str(error))

    def _answer_call(self, one: Participant, kind: bytes, request: bytes) -> None:
        if kind != messages.CALL or not one.joined or self._on_call is None:
            raise RendezvousError(_UNKNOWN)
        answer = self._on_call(one.rank, request)
        _append(one.connection, one.numbers, messages.CALL + answer)

    def _join(self, one: Participant, size: int) -> None:
        rank, generation = one.rank, one.generation
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
        one.joined = True
        self._ranks[generation, rank] = one
        if one.number is None:  # a collector welcomes its clients itself
            self._unauthenticated.discard(one.connection)
            one.connection.outgoing += pack_frame(messages.pack_welcome(self._session))

    def _gather(self, one: Participant, number: int, payload: bytes) -> None:
        rank, generation = one.rank, one.generation
        if number != one.rounds:
            raise RendezvousError(
                f"two processes claim to be rank {rank}: give each process a rank of its own"
                if number < one.rounds
                else _UNKNOWN
            )
        one.rounds += 1
        answers = self._state.contribute((generation, number), rank, payload, time.monotonic())
        if number == 0:
            self._on_event(RankEvent("arrived", rank, generation))
        self._send_answers(answers)

    def _note_report(self, one: Participant, event: str, text: str) -> None:
        if event not in messages.REPORTS:
            raise RendezvousError("the rendezvous does not know this event")
        one.initialised = True
        if event == "finished":
            one.end_report = "has finished"
        elif event != "initialised":
            one.end_report = f"gave up: {printable(text, 500)}"
        self._on_event(RankEvent(event, one.rank, one.generation, printable(text, messages.TEXT_LIMIT)))

    def _note_failure(self, one: Participant, culprit: int, text: str) -> None:
        """Handles a rank's report that it cannot join; at fault is itself, or a peer that it has lost."""
        text = printable(text, messages.TEXT_LIMIT)
        if not 0 <= culprit < self.job.size:
            raise RendezvousError(f"there is no rank {culprit} in this job")
        if culprit == one.rank:
            text = f"rank {one.rank} could not link to the others: {text}"
        if not self._state.has_failed(one.generation):
            self._on_event(RankEvent("overdue", culprit, one.generation, text, (culprit,)))
        self._fail_generation(one.generation, culprit, text)

    def _fail_generation(self, generation: int, culprit: int, text: str) -> None:
        """Notifies all ranks in this init(), whether they wait in an all-gather or for each other."""
        if self._state.mark_failed(generation, text):
            concerned = [one for (other, _), one in self._ranks.items() if other == generation]
            message = messages.pack_failure(culprit, text)
            self._deliver([one for one in concerned if not one.initialised], message)

    def _send_answers(self, answers: list[Answer]) -> None:
        for answer in answers:
            generation = answer.key[0]
            if answer.missing:
                kind = "overdue" if answer.timed_out else "departed"
                self._on_event(RankEvent(kind, answer.missing[0], generation, answer.error, answer.missing))
            waiting = [one for rank in answer.waiting if (one := self._ranks.get((generation, rank)))]
            self._deliver(waiting, _message_of(answer))

    def _deliver(self, recipients: Iterable[Participant], message: bytes) -> None:
        """Sends a message once on each connection of the recipients. All queues share its bytes."""
        numbers: dict[ServedConnection, list[int]] = {}
        for one in recipients:
            numbers.setdefault(one.connection, []).extend(one.numbers)
        for connection, of_collector in numbers.items():
            if connection.is_open:
                _append(connection, of_collector, message)
                self._flush_or_drop(connection)

    def _refuse(self, one: Participant, reason: str) -> None:
        """Ends the connection of an authenticated client, and sends it the reason."""
        refusal = messages.REFUSED + reason.encode()
        self._on_event(RankEvent("refused", one.rank, one.generation, reason))
        if one.number is None:
            self._close_with(one.connection, refusal)
            return
        _append(one.connection, one.numbers, refusal)
        one.connection.outgoing += pack_frame(messages.CLOSE + NUMBER.pack(one.number))
        self._clients.get(one.connection, {}).pop(one.number, None)
        self._depart(one, _GONE)

    def _note_rejection(self, connection: ServedConnection, text: str) -> None:
        if connection.peer is None:
            self._rejection_log.add(text)
        elif _is_collector(connection):
            self._on_event(RankEvent("refused", RENDEZVOUS_RANK, 0, text))
        else:
            one = Participant(connection, connection.peer)
            self._on_event(RankEvent("refused", one.rank, one.generation, text))

    def _note_end(self, connection: ServedConnection) -> None:
        reason = _HOST_GONE if _is_collector(connection) else _GONE
        for one in self._clients.pop(connection, {}).values():
            self._depart(one, reason)

    def _depart(self, one: Participant, reason: str) -> None:
        """Handles the end of a client's connection."""
        if not one.joined:
            return
        rank, generation = one.rank, one.generation
        one.joined = False
        del self._ranks[generation, rank]
        if one.initialised and not one.end_report:
            self._on_event(RankEvent("disconnected", rank, generation))
        reason = one.end_report or reason
        self._send_answers(self._state.note_departure(rank, generation, reason))
        if not one.initialised and one.rounds:
            self._fail_generation(generation, rank, f"rank {rank} {reason}")


def _is_collector(connection: ServedConnection) -> bool:
    return connection.peer is not None and connection.peer.rank == COLLECTOR_RANK


def _append(connection: ServedConnection, numbers: Sequence[int], message: bytes) -> None:
    """Queues a message for the connection's own client, or for those of a collector with these numbers."""
    before = messages.pack_delivery(numbers) if numbers else b""
    connection.outgoing += frame_header(len(before) + len(message)) + before
    connection.outgoing += message


def _message_of(answer: Answer) -> bytes:
    if answer.error:
        return (messages.TIMED_OUT if answer.timed_out else messages.REFUSED) + answer.error.encode()
    return messages.pack_payloads(answer.payloads)
