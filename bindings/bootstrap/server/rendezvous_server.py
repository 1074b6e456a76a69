"""The server side of the rendezvous: a single thread serves all ranks and never blocks on any of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from sirtaki.bindings.bootstrap import messages
from sirtaki.bindings.bootstrap.connection.unauthenticated import RejectionLog
from sirtaki.bindings.bootstrap.connection.wire import frame_header, pack_frame, printable
from sirtaki.bindings.bootstrap.job import COLLECTOR_RANK, RENDEZVOUS_RANK, Job, RendezvousError, name_of
from sirtaki.bindings.bootstrap.messages import NUMBER, RankEvent
from sirtaki.bindings.bootstrap.server.collector_sessions import CollectorSession, CollectorSessions
from sirtaki.bindings.bootstrap.server.connection_server import ConnectionServer, ServedConnection
from sirtaki.bindings.bootstrap.server.participant import Participant
from sirtaki.bindings.bootstrap.server.rendezvous_state import Answer, RendezvousState

_PER_RANK = 4  # connections behind a collector: for a world, for calls, and those that end meanwhile
_MAX_REPORTS = 8  # of a client: each init() has another one, with two or three reports
_UNKNOWN = "the rendezvous does not understand this message"
_GONE = "has gone (its process ended, or its init failed)"
_HOST_GONE = "has gone (the connection to the agent of its host ended)"


@dataclass(frozen=True)
class LastMessagesWait:
    """A wait for the ranks' last messages: its deadline, its callback, and the ranks that it skips."""

    deadline: float
    then: Callable[[Sequence[int]], None]
    lost: frozenset[int]

    def awaits(self, session: CollectorSession) -> bool:
        if session.is_drained:
            return False
        if not session.ranks:  # without a connection, either, there is nobody to wait for
            return session.served is not None
        return any(rank.rank not in self.lost for rank in session.ranks.values())


class RendezvousServer(ConnectionServer):
    """Serves the all-gathers of `job`, as a `ConnectionServer`.

    A client is a rank, or the collector of a host: a connection on which the messages of several ranks come,
    and to which an answer for several of them goes once. A collector whose connection breaks may continue on
    another one (`resumable`); until then its ranks are still there.

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
        self._clients: dict[ServedConnection, Participant] = {}  # with connections of their own
        self._collectors = CollectorSessions(job.size)
        self._drain: LastMessagesWait | None = None
        self._ranks: dict[tuple[int, int], Participant] = {}  # that have joined, by generation and rank

    def start(self) -> RendezvousServer:
        self._thread.start()
        return self

    def __enter__(self) -> RendezvousServer:
        return self.start()

    def rank_ended(self, rank: int, reason: str) -> None:
        """Records that a rank takes part in nothing any more, for example: "it has ended (exit code 0)"."""
        self._call_soon(lambda: self._send_answers(self._state.note_departure(rank, math.inf, reason)))

    def drain(
        self, seconds: float, then: Callable[[Sequence[int]], None], lost: Collection[int] = ()
    ) -> None:
        """Waits for messages that ranks sent before they ended; they may arrive after the news of the ends.

        Calls `then` from the server's thread, after at most `seconds`, with the ranks of other hosts with
        possibly missing last messages. Does not wait for ranks that are `lost` with their host.
        """
        drain = LastMessagesWait(time.monotonic() + seconds, then, frozenset(lost))
        self._call_soon(lambda: self._begin_drain(drain))

    def send_message(self, rank: int, payload: bytes) -> None:
        """Sends bytes to a client, as its next message; drops them if it is not connected."""
        self._call_soon(lambda: self._pass_on(rank, payload))

    def is_connected(self, rank: int) -> bool:
        """Returns whether a client has joined and is connected. For servers without a thread only."""
        return (0, rank) in self._ranks

    # All methods below run on the server's thread, or on that of its owner.

    def _pass_on(self, rank: int, payload: bytes) -> None:
        if participant := self._ranks.get((0, rank)):
            self._deliver([participant], messages.MESSAGE + payload)

    def _expire(self, now: float) -> None:
        self._send_answers(self._state.expire(now))
        for session in self._collectors.overdue(now):
            self._end_session(session)
        self._end_drain(now)

    def _begin_drain(self, drain: LastMessagesWait) -> None:
        self._drain = drain
        for session in self._collectors.all():
            session.is_drained = False
            session.send(messages.DRAIN)
            if session.served is not None:
                self._flush_or_drop(session.served)

    def _end_drain(self, now: float) -> None:
        if (drain := self._drain) is None:
            return
        behind = [session for session in self._collectors.all() if drain.awaits(session)]
        connected = {rank for _, rank in self._ranks} - drain.lost
        if now < drain.deadline and (behind or connected):
            return
        self._drain = None
        missing = {rank.rank for session in behind for rank in session.ranks.values()}
        drain.then(sorted(missing - drain.lost))

    def _next_deadline(self) -> float | None:
        drain = None if self._drain is None else self._drain.deadline
        deadlines = (self._state.next_deadline(), self._collectors.next_deadline(), drain)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _finish(self) -> None:
        for session in self._collectors.all():
            if session.served is not None:
                session.served.outgoing += pack_frame(messages.GOODBYE)
                self._flush_or_drop(session.served)

    def _limit_of(self, connection: ServedConnection) -> int:
        if self._collectors.of(connection) is not None:
            return messages.COLLECTED_LIMIT
        own = self._clients.get(connection)
        return messages.REQUEST_LIMIT if own is None else own.limit

    def _take(self, connection: ServedConnection, message: bytes) -> None:
        if _is_collector(connection):
            try:
                self._take_from_collector(connection, message)
            except RendezvousError as error:
                if (session := self._collectors.of(connection)) is not None:
                    self._end_session(session)
                self._close_with(connection, messages.REFUSED + str(error).encode())
                self._on_event(RankEvent("refused", RENDEZVOUS_RANK, 0, str(error)))
            return
        peer = connection.peer
        assert peer is not None
        self._handle(self._clients.setdefault(connection, Participant(connection, peer)), message)

    def _take_from_collector(self, connection: ServedConnection, message: bytes) -> None:
        """Handles a message on a collector's connection. Raises RendezvousError."""
        session, kind = self._collectors.of(connection), message[:1]
        if not self._accepts_collectors:
            raise RendezvousError(
                "the agent of a host connected, but ranks connect to this rendezvous directly"
            )
        if session is None:
            replaced = self._collectors.open(connection, message, self._session)
            self._unauthenticated.discard(connection)
            if replaced is not None:
                self._drop(replaced)
        elif kind == messages.CONFIRM:
            session.confirm(messages.unpack_count(message[1:]))
        elif message == messages.GOODBYE:
            self._end_session(session)
            self._end_soon(connection)
        else:
            confirmation = session.frames.note_received(len(message))
            if message == messages.DRAINED:
                session.is_drained = True
            else:
                self._take_collected(session, message)
            connection.outgoing += confirmation

    def _take_collected(self, session: CollectorSession, message: bytes) -> None:
        """Handles a message about a rank behind a collector. One from a client that was refused is dropped.

        Raises RendezvousError.
        """
        kind, number, body = messages.unpack_collected(message)
        ranks = session.ranks
        if kind == messages.ARRIVED and number not in ranks:
            if len(ranks) >= _PER_RANK * self.job.size:
                raise RendezvousError(f"more than {len(ranks)} processes of a host have connected")
            ranks[number] = Participant(session, messages.unpack_identity(body), number)
        elif kind == messages.PASSED:
            if (participant := ranks.get(number)) and len(body) > participant.limit:
                raise RendezvousError(
                    f"{name_of(participant.rank)} sent a message of {len(body)} bytes: too many"
                )
            if participant:
                self._handle(participant, body)
        elif kind == messages.LEFT:
            if participant := ranks.pop(number, None):
                self._depart(participant, _GONE)
        else:
            raise RendezvousError(_UNKNOWN)

    def _handle(self, participant: Participant, message: bytes) -> None:
        kind, body = message[:1], message[1:]
        try:
            if kind == messages.JOIN and not participant.joined and len(body) == NUMBER.size:
                self._join(participant, NUMBER.unpack(body)[0])
            elif participant.calls:
                self._answer_call(participant, kind, body)
            elif (
                kind == messages.GATHER
                and participant.joined
                and NUMBER.size <= len(body) <= NUMBER.size + messages.PAYLOAD_LIMIT
            ):
                self._gather(participant, NUMBER.unpack_from(body)[0], body[NUMBER.size :])
            elif kind == messages.REPORT and participant.joined:
                self._note_report(participant, *messages.unpack_report(body))
            elif kind == messages.JOIN_FAILED and participant.joined:
                self._note_failure(participant, *messages.unpack_failure(body))
            elif kind == messages.MESSAGE and participant.joined and self._on_message is not None:
                self._on_message(participant.rank, body)
            else:
                raise RendezvousError(_UNKNOWN)
        except RendezvousError as error:
            self._refuse(participant, str(error))

    def _answer_call(self, participant: Participant, kind: bytes, request: bytes) -> None:
        if kind != messages.CALL or not participant.joined or self._on_call is None:
            raise RendezvousError(_UNKNOWN)
        answer = self._on_call(participant.rank, request)
        self._deliver([participant], messages.CALL + answer)

    def _join(self, participant: Participant, size: int) -> None:
        rank, generation = participant.rank, participant.generation
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
        participant.joined = True
        self._ranks[generation, rank] = participant
        if isinstance(participant.line, ServedConnection):  # a collector welcomes its clients itself
            self._unauthenticated.discard(participant.line)
            participant.line.outgoing += pack_frame(messages.pack_welcome(self._session))

    def _gather(self, participant: Participant, number: int, payload: bytes) -> None:
        rank, generation = participant.rank, participant.generation
        if number != participant.rounds:
            raise RendezvousError(
                f"two processes claim to be rank {rank}: give each process a rank of its own"
                if number < participant.rounds
                else _UNKNOWN
            )
        participant.rounds += 1
        answers = self._state.contribute((generation, number), rank, payload, time.monotonic())
        if number == 0:
            self._on_event(RankEvent("arrived", rank, generation))
        self._send_answers(answers)

    def _note_report(self, participant: Participant, event: str, text: str) -> None:
        if event not in messages.REPORTS:
            raise RendezvousError("the rendezvous does not know this event")
        participant.reports += 1
        if participant.reports > _MAX_REPORTS:
            raise RendezvousError(f"rank {participant.rank} has sent more than {_MAX_REPORTS} reports")
        participant.initialised = True
        if event == "finished":
            participant.end_report = "has finished"
        elif event not in ("initialised", "thread_failed", "can_stop"):
            participant.end_report = f"gave up: {printable(text, 500)}"
        self._on_event(
            RankEvent(event, participant.rank, participant.generation, printable(text, messages.TEXT_LIMIT))
        )

    def _note_failure(self, participant: Participant, culprit: int, text: str) -> None:
        """Handles a rank's report that it cannot join; at fault is itself, or a peer that it has lost."""
        text = printable(text, messages.TEXT_LIMIT)
        if not 0 <= culprit < self.job.size:
            raise RendezvousError(f"there is no rank {culprit} in this job")
        if culprit == participant.rank:
            text = f"rank {participant.rank} could not link to the others: {text}"
        if not self._state.has_failed(participant.generation):
            self._on_event(RankEvent("overdue", culprit, participant.generation, text, (culprit,)))
        self._fail_generation(participant.generation, culprit, text)

    def _fail_generation(self, generation: int, culprit: int, text: str) -> None:
        """Notifies all ranks in this init(), whether they wait in an all-gather or for each other."""
        if self._state.mark_failed(generation, text):
            concerned = [rank for (other, _), rank in self._ranks.items() if other == generation]
            message = messages.pack_failure(culprit, text)
            self._deliver([participant for participant in concerned if not participant.initialised], message)

    def _send_answers(self, answers: list[Answer]) -> None:
        for answer in answers:
            generation = answer.key[0]
            if answer.missing:
                kind = "overdue" if answer.timed_out else "departed"
                self._on_event(RankEvent(kind, answer.missing[0], generation, answer.error, answer.missing))
            waiting = [
                participant for rank in answer.waiting if (participant := self._ranks.get((generation, rank)))
            ]
            self._deliver(waiting, _message_of(answer))

    def _deliver(self, recipients: Iterable[Participant], message: bytes) -> None:
        """Sends a message once on each connection of the recipients. All queues share its bytes."""
        numbers: dict[ServedConnection | CollectorSession, list[int]] = {}
        for recipient in recipients:
            numbers.setdefault(recipient.line, []).extend(recipient.numbers)
        for line, of_collector in numbers.items():
            if isinstance(line, CollectorSession):
                line.send(messages.pack_delivery(of_collector), message)
                connection = line.served
            else:
                connection = line
                connection.outgoing += frame_header(len(message))
                connection.outgoing += message
            if connection is not None and connection.is_open:
                self._flush_or_drop(connection)

    def _refuse(self, participant: Participant, reason: str) -> None:
        """Ends the connection of an authenticated client, and sends it the reason."""
        refusal = messages.REFUSED + reason.encode()
        self._on_event(RankEvent("refused", participant.rank, participant.generation, reason))
        if isinstance(participant.line, ServedConnection):
            self._close_with(participant.line, refusal)
            return
        assert participant.number is not None
        participant.line.send(messages.pack_delivery([participant.number]), refusal)
        participant.line.send(messages.CLOSE + NUMBER.pack(participant.number))
        participant.line.ranks.pop(participant.number, None)
        self._depart(participant, _GONE)

    def _note_rejection(self, connection: ServedConnection, text: str) -> None:
        if connection.peer is None:
            self._rejection_log.add(text)
        elif _is_collector(connection):
            self._on_event(RankEvent("refused", RENDEZVOUS_RANK, 0, text))
        else:
            participant = Participant(connection, connection.peer)
            self._on_event(RankEvent("refused", participant.rank, participant.generation, text))

    def _note_end(self, connection: ServedConnection) -> None:
        self._collectors.lose(connection, time.monotonic())
        if (participant := self._clients.pop(connection, None)) is not None:
            self._depart(participant, _GONE)

    def _end_session(self, session: CollectorSession) -> None:
        """Ends the session of a host's collector and ranks: it has ended, or was silent for too long."""
        self._collectors.end(session)
        for rank in list(session.ranks.values()):
            self._depart(rank, _HOST_GONE)
        session.ranks.clear()

    def _depart(self, participant: Participant, reason: str) -> None:
        """Handles the end of a client's connection."""
        if not participant.joined:
            return
        rank, generation = participant.rank, participant.generation
        participant.joined = False
        del self._ranks[generation, rank]
        if participant.initialised and not participant.end_report:
            self._on_event(RankEvent("disconnected", rank, generation))
        reason = participant.end_report or reason
        self._send_answers(self._state.note_departure(rank, generation, reason))
        if not participant.initialised and participant.rounds:
            self._fail_generation(generation, rank, f"rank {rank} {reason}")


def _is_collector(connection: ServedConnection) -> bool:
    return connection.peer is not None and connection.peer.rank == COLLECTOR_RANK


def _message_of(answer: Answer) -> bytes:
    if answer.error:
        return (messages.TIMED_OUT if answer.timed_out else messages.REFUSED) + answer.error.encode()
    return messages.pack_payloads(answer.payloads)
