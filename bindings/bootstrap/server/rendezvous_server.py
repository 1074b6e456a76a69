"""The server side of the rendezvous: a single thread serves all ranks and never blocks on any of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from sirtaki.bindings.bootstrap import messages
from sirtaki.bindings.bootstrap.connection.unauthenticated import RejectionLog
from sirtaki.bindings.bootstrap.connection.wire import TEXT_LIMIT, Frame, MessageKind, Sender, printable
from sirtaki.bindings.bootstrap.job import COLLECTOR_RANK, RENDEZVOUS_RANK, Job, RendezvousError
from sirtaki.bindings.bootstrap.messages import RankEvent
from sirtaki.bindings.bootstrap.server.clients import CollectorSession, CollectorSessions, Participant
from sirtaki.bindings.bootstrap.server.connection_server import ConnectionServer, ServedConnection
from sirtaki.bindings.bootstrap.server.rendezvous_state import Answer, RendezvousState

_PER_RANK = 4  # connections behind a collector: for a world, for calls, and those that end meanwhile
_MAX_REPORTS = 8  # of a client: each init() has another one, with two or three reports
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
    rank arrived. `on_message`, called from that thread with a rank and a frame, receives what clients send
    with `send_message`. `on_call`, called in the same way, answers the requests of `call`; it may raise
    RendezvousError. Only the server of a job whose ranks an agent starts `accepts_collectors`.
    """

    def __init__(
        self,
        address: str,
        job: Job,
        start_timeout: float = 120.0,
        on_event: Callable[[RankEvent], None] = lambda event: None,
        interfaces: Sequence[str] = (),
        on_message: Callable[[int, Frame], None] | None = None,
        on_call: Callable[[int, Frame], bytes] | None = None,
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

    def send_message(self, rank: int, frame: Frame) -> None:
        """Sends a message to a client; drops it if the client is not connected."""
        self._call_soon(lambda: self._pass_on(rank, frame))

    def is_connected(self, rank: int) -> bool:
        """Returns whether a client has joined and is connected. For servers without a thread only."""
        return (0, rank) in self._ranks

    # All methods below run on the server's thread, or on that of its owner.

    def _pass_on(self, rank: int, frame: Frame) -> None:
        if participant := self._ranks.get((0, rank)):
            self._deliver([participant], frame)

    def _expire(self, now: float) -> None:
        self._send_answers(self._state.expire(now))
        for session in self._collectors.overdue(now):
            self._end_session(session)
        self._end_drain(now)

    def _begin_drain(self, drain: LastMessagesWait) -> None:
        self._drain = drain
        for session in self._collectors.all():
            session.is_drained = False
            session.send(Frame(MessageKind.FLUSH).pack())
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
                session.served.outgoing += Frame(MessageKind.GOODBYE).pack()
                self._flush_or_drop(session.served)

    def _sender_of(self, connection: ServedConnection) -> Sender:
        if not _is_collector(connection):
            return self._client(connection).sender
        return Sender.NEW_COLLECTOR if self._collectors.of(connection) is None else Sender.COLLECTOR

    def _client(self, connection: ServedConnection) -> Participant:
        assert connection.peer is not None
        return self._clients.setdefault(connection, Participant(connection, connection.peer))

    def _take(self, connection: ServedConnection, frame: Frame) -> None:
        try:
            if _is_collector(connection):
                self._take_from_collector(connection, frame)
            else:
                self._handle(self._client(connection), frame)
        except RendezvousError as error:
            self._refuse_frame(connection, str(error))

    def _refuse_frame(self, connection: ServedConnection, reason: str) -> None:
        if not _is_collector(connection):
            self._refuse(self._client(connection), reason)
            return
        if (session := self._collectors.of(connection)) is not None:
            self._end_session(session)
        self._close_with(connection, Frame.of(MessageKind.REJECTED, reason))
        self._on_event(RankEvent("refused", RENDEZVOUS_RANK, 0, reason))

    def _take_from_collector(self, connection: ServedConnection, frame: Frame) -> None:
        """Handles a message on a collector's connection. Raises RendezvousError."""
        session = self._collectors.of(connection)
        if not self._accepts_collectors:
            raise RendezvousError(
                "the agent of a host connected, but ranks connect to this rendezvous directly"
            )
        if session is None:
            replaced = self._collectors.open(connection, frame, self._session)
            self._unauthenticated.discard(connection)
            if replaced is not None:
                self._drop(replaced)
        elif frame.kind == MessageKind.CONFIRM:
            session.confirm(frame.number)
        elif frame.kind == MessageKind.GOODBYE:
            self._end_session(session)
            self._end_soon(connection)
        else:
            confirmation = session.frames.note_received(frame)
            self._take_collected(session, frame)
            connection.outgoing += confirmation

    def _take_collected(self, session: CollectorSession, frame: Frame) -> None:
        """Handles a message about a rank behind a collector. One from a client that was refused is dropped.

        Raises RendezvousError.
        """
        kind, number, ranks = frame.kind, frame.number, session.ranks
        if kind == MessageKind.FLUSHED:
            session.is_drained = True
        elif kind == MessageKind.ARRIVED and number not in ranks:
            if len(ranks) >= _PER_RANK * self.job.size:
                raise RendezvousError(f"more than {len(ranks)} processes of a host have connected")
            ranks[number] = Participant(session, messages.unpack_arrival(frame), number)
        elif kind == MessageKind.SAID:
            if participant := ranks.get(number):
                try:
                    self._handle(participant, messages.unpack_said(frame, participant.sender))
                except RendezvousError as error:
                    self._refuse(participant, str(error))
        elif kind == MessageKind.LEFT:
            if participant := ranks.pop(number, None):
                self._depart(participant, _GONE)
        else:
            raise frame.unexpected()

    def _handle(self, participant: Participant, frame: Frame) -> None:
        """Handles the next message of a client. Raises RendezvousError."""
        kind = frame.kind
        if kind == MessageKind.JOIN:
            self._join(participant, frame.number)
        elif kind == MessageKind.GATHER:
            self._gather(participant, frame)
        elif kind == MessageKind.EVENT:
            if frame.number >= len(messages.REPORTS):
                raise RendezvousError("the rendezvous does not know this event")
            self._note_report(participant, messages.REPORTS[frame.number], frame.text)
        elif kind == MessageKind.FAILED:
            self._note_failure(participant, frame.rank, frame.text)
        elif participant.calls and self._on_call is not None:
            answer = self._on_call(participant.rank, frame)
            self._deliver([participant], Frame(MessageKind.REPLY, payload=answer))
        elif not participant.calls and self._on_message is not None:
            self._on_message(participant.rank, frame)
        else:
            raise frame.unexpected()

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
            participant.line.outgoing += messages.pack_welcome(self._session).pack()

    def _gather(self, participant: Participant, frame: Frame) -> None:
        rank, generation, number = participant.rank, participant.generation, frame.number
        if number > participant.rounds:
            raise frame.unexpected()
        if number < participant.rounds:
            raise RendezvousError(
                f"two processes claim to be rank {rank}: give each process a rank of its own"
            )
        participant.rounds += 1
        answers = self._state.contribute((generation, number), rank, frame.payload, time.monotonic())
        if number == 0:
            self._on_event(RankEvent("arrived", rank, generation))
        self._send_answers(answers)

    def _note_report(self, participant: Participant, event: str, text: str) -> None:
        participant.reports += 1
        if participant.reports > _MAX_REPORTS:
            raise RendezvousError(f"rank {participant.rank} has sent more than {_MAX_REPORTS} reports")
        participant.initialised = True
        if event == "finished":
            participant.end_report = "has finished"
        elif event not in ("initialised", "thread_failed", "can_stop"):
            participant.end_report = f"gave up: {printable(text, 500)}"
        self._on_event(
            RankEvent(event, participant.rank, participant.generation, printable(text, TEXT_LIMIT))
        )

    def _note_failure(self, participant: Participant, culprit: int, text: str) -> None:
        """Handles a rank's report that it cannot join; at fault is itself, or a peer that it has lost."""
        text = printable(text, TEXT_LIMIT)
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
            failure = Frame.of(MessageKind.FAILED, text, culprit)
            self._deliver([participant for participant in concerned if not participant.initialised], failure)

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

    def _deliver(self, recipients: Iterable[Participant], frame: Frame) -> None:
        """Sends a message once on each connection of the recipients. All queues share its bytes."""
        packed = frame.pack(self.job.size)
        numbers: dict[ServedConnection | CollectorSession, list[int]] = {}
        for recipient in recipients:
            numbers.setdefault(recipient.line, []).extend(recipient.numbers)
        for line, of_collector in numbers.items():
            if isinstance(line, CollectorSession):
                line.send(messages.pack_delivery(of_collector, packed, self.job.size), packed)
                connection = line.served
            else:
                connection = line
                connection.outgoing += packed
            if connection is not None and connection.is_open:
                self._flush_or_drop(connection)

    def _refuse(self, participant: Participant, reason: str) -> None:
        """Ends the connection of an authenticated client, and sends it the reason."""
        refusal = Frame.of(MessageKind.REJECTED, reason)
        self._on_event(RankEvent("refused", participant.rank, participant.generation, reason))
        if isinstance(participant.line, ServedConnection):
            self._close_with(participant.line, refusal)
            return
        assert participant.number is not None
        self._deliver([participant], refusal)
        participant.line.send(Frame(MessageKind.CLOSE, number=participant.number).pack())
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


def _message_of(answer: Answer) -> Frame:
    if answer.error:
        kind = MessageKind.TIMED_OUT if answer.timed_out else MessageKind.REJECTED
        return Frame.of(kind, answer.error)
    return messages.pack_payloads(answer.payloads)
