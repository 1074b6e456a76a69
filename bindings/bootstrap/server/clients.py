"""The clients of the rendezvous: ranks, with connections of their own or behind the collectors of hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sirtaki.bindings.bootstrap.connection.wire import HEADER, TOKEN_BYTES, Frame, MessageKind, Sender
from sirtaki.bindings.bootstrap.job import CALLS, Identity, RendezvousError
from sirtaki.bindings.bootstrap.messages import pack_welcome

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.server.connection_server import ServedConnection


# Frames that outlive the connection on which they were sent: the two sides count what they receive. When
# their connection breaks, they continue on another one, and each sends again what the other one has not
# received: nothing is lost, and nothing arrives twice.

# Received bytes after which the other side is told that it need not keep them any more.
CONFIRM_BYTES = 32 * 1024


class ResumableFrames:
    """The frames of a side of a connection: the sent frames that it keeps, and the number it has received.

    Each frame has an owner, a number whose meaning is the user's.
    """

    def __init__(self) -> None:
        self.received = 0  # frames
        self._received_bytes = 0  # since the last confirmation
        self._kept: deque[tuple[int, tuple[bytes, ...]]] = deque()
        self._confirmed = 0  # frames that were kept before those

    def keep(self, owner: int, *parts: bytes) -> None:
        """Records a sent frame, given in parts; large parts are not copied."""
        self._kept.append((owner, parts))

    def confirm(self, count: int) -> Iterator[tuple[int, int]]:
        """Yields the owner and the bytes of each frame that the other side has received meanwhile: `count`
        frames in all. Raises RendezvousError if it cannot have received so many.
        """
        if not self._confirmed <= count <= self._confirmed + len(self._kept):
            raise RendezvousError("the other side has confirmed messages that were not sent")
        while self._confirmed < count:
            owner, parts = self._kept.popleft()
            self._confirmed += 1
            yield owner, sum(map(len, parts))

    def note_received(self, frame: Frame) -> bytes:
        """Counts a frame; returns a confirmation if it is due, else b""."""
        self.received += 1
        self._received_bytes += HEADER.size + len(frame.payload)
        if self._received_bytes < CONFIRM_BYTES:
            return b""
        self._received_bytes = 0
        return Frame(MessageKind.CONFIRM, number=self.received).pack()

    def unconfirmed(self) -> Iterator[bytes]:
        """Yields the parts of all frames that the other side may not have received."""
        for _, parts in self._kept:
            yield from parts


# ---- Ranks and collectors ------------------------------------------------------------------------------

_CALLS_GENERATION = -1  # of connections for calls, which belong to none
# Longest time, in seconds, for which a broken connection may be replaced. The collector gives up before: it
# notices the end within 80 s, if nothing is sent, and then tries for 60 s.
KEPT_SECONDS = 150.0
_SERVER = 0  # the owner of all frames of the server


@dataclass(eq=False)
class Participant:
    """One client of the rendezvous, over a connection of its own or that of its host's collector."""

    line: ServedConnection | CollectorSession
    identity: Identity
    number: int | None = None  # the collector's, for this client; None: the connection is its own
    joined: bool = False
    initialised: bool = False
    rounds: int = 0  # the number of all-gathers that it has taken part in
    reports: int = 0  # that it has sent
    end_report: str = ""  # its report of its own end

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def generation(self) -> int:
        return _CALLS_GENERATION if self.calls else self.identity.generation

    @property
    def calls(self) -> bool:
        """Returns whether a rank asks the launcher's service over this connection."""
        return self.identity.channel == CALLS

    @property
    def sender(self) -> Sender:
        """Returns the sender of its next message."""
        if not self.joined:
            return Sender.NEWCOMER
        return Sender.CALLER if self.calls else Sender.RANK

    @property
    def numbers(self) -> list[int]:
        return [] if self.number is None else [self.number]


@dataclass(eq=False)
class CollectorSession:
    """One collector, and the ranks behind it by its numbers for them. Outlives its connection."""

    token: bytes
    served: ServedConnection | None  # its connection, while there is one
    ranks: dict[int, Participant] = field(default_factory=dict)
    frames: ResumableFrames = field(default_factory=ResumableFrames)
    deadline: float | None = None  # when it ends, if it has no connection until then
    is_drained: bool = False  # whether all that its ranks have sent has arrived, and they have gone

    def send(self, *parts: bytes) -> None:
        """Queues a frame given in parts; large parts are not copied."""
        self.frames.keep(_SERVER, *parts)
        if self.served is not None:
            for part in parts:
                self.served.outgoing += part

    def confirm(self, count: int) -> None:
        """Forgets what the collector has received. Raises RendezvousError if it cannot have received it."""
        for _ in self.frames.confirm(count):
            pass


class CollectorSessions:
    """All collectors of a job of `size` ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_token: dict[bytes, CollectorSession] = {}
        self._by_connection: dict[ServedConnection, CollectorSession] = {}

    def of(self, connection: ServedConnection) -> CollectorSession | None:
        return self._by_connection.get(connection)

    def open(
        self, connection: ServedConnection, frame: Frame, server_session: bytes
    ) -> ServedConnection | None:
        """Handles the first message on a collector's connection, and queues the answer.

        Returns the connection that this one replaces, which is to be closed. Raises RendezvousError.
        """
        token = frame.payload
        if frame.kind == MessageKind.RESUME:
            return self._resume(connection, token, frame.number)
        if frame.number != self._size or len(token) != TOKEN_BYTES or token in self._by_token:
            raise frame.unexpected()
        session = CollectorSession(token, connection)
        self._by_token[token] = self._by_connection[connection] = session
        connection.outgoing += pack_welcome(server_session).pack()
        return None

    def _resume(self, connection: ServedConnection, token: bytes, received: int) -> ServedConnection | None:
        session = self._by_token.get(token)
        if session is None:
            raise RendezvousError(
                "its connection was interrupted for too long, or belonged to another rendezvous"
            )
        session.confirm(received)
        replaced = session.served
        if replaced is not None:  # this side has not noticed its end
            del self._by_connection[replaced]
        self._by_connection[connection] = session
        session.served, session.deadline = connection, None
        connection.outgoing += Frame(MessageKind.RESUMED, number=session.frames.received).pack()
        for part in session.frames.unconfirmed():
            connection.outgoing += part
        return replaced

    def lose(self, connection: ServedConnection, now: float) -> None:
        """Records the loss of a connection; the collector may resume on a new connection for KEPT_SECONDS."""
        if (session := self._by_connection.pop(connection, None)) is not None:
            session.served, session.deadline = None, now + KEPT_SECONDS

    def end(self, session: CollectorSession) -> None:
        """Ends a session, which cannot be continued."""
        self._by_token.pop(session.token, None)
        if session.served is not None:
            self._by_connection.pop(session.served, None)

    def overdue(self, now: float) -> list[CollectorSession]:
        """Returns the sessions that have had no connection for too long."""
        return [
            session
            for session in self._by_token.values()
            if session.deadline is not None and session.deadline <= now
        ]

    def next_deadline(self) -> float | None:
        deadlines = [session.deadline for session in self._by_token.values() if session.deadline is not None]
        return min(deadlines, default=None)

    def all(self) -> list[CollectorSession]:
        return list(self._by_token.values())
