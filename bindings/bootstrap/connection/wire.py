"""Bytes on a connection with a deadline, and the frames in which messages travel on all connections.

A frame is a fixed header and a payload. Nothing of a payload is read before its kind and its length were
compared with the table of kinds.
"""

from __future__ import annotations

import enum
import json
import struct
import time
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from sirtaki.bindings.bootstrap.job import HandshakeError, RendezvousTimeout

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection


class Form(enum.Enum):
    """The content of a payload. The numbers of a message are in its header."""

    NOTHING = enum.auto()
    BYTES = enum.auto()
    TEXT = enum.auto()
    JSON = enum.auto()  # an object


class Sender(enum.Enum):
    """A side of a connection that sends messages."""

    HVDRUN = enum.auto()  # to the agent on another host
    AGENT = enum.auto()  # to hvdrun
    STARTER = enum.auto()  # hvdrun or an agent, to a spare that it has started
    STANDBY = enum.auto()  # a spare, to that process
    NEWCOMER = enum.auto()  # a rank to the rendezvous, before it has joined
    RANK = enum.auto()  # to the rendezvous; it may be a worker of an elastic job, or a server of tables
    CALLER = enum.auto()  # a rank that runs a function of `sirtaki.run`, to its launcher
    NEW_COLLECTOR = enum.auto()  # the collector of a host, to the rendezvous, before it has joined
    COLLECTOR = enum.auto()  # to the rendezvous
    RENDEZVOUS = enum.auto()  # to a rank
    ROOT = enum.auto()  # the rendezvous, to a collector
    LAUNCHER = enum.auto()  # hvdrun, to a worker, to a server of tables, or to a caller


NOTHING, BYTES, TEXT, JSON = Form
(
    HVDRUN, AGENT, STARTER, STANDBY, NEWCOMER, RANK, CALLER,
    NEW_COLLECTOR, COLLECTOR, RENDEZVOUS, ROOT, LAUNCHER,
) = Sender  # fmt: skip

HEADER = struct.Struct("!4sBiQI")  # magic, kind, rank, number, length of the payload
SHORT = 64 << 10
LONG = 1 << 20
HUGE = 16 << 20
TOKEN_BYTES = 16


@enum.unique
class MessageKind(enum.IntEnum):
    """Number, form, largest payload in bytes, and senders of each kind.

    `rank` in the header of a frame is the rank that it is about, if any; `number` is said below.
    """

    form: Form
    limit: int
    senders: tuple[Sender, ...]

    def __new__(cls, value: int, form: Form, limit: int, *senders: Sender) -> MessageKind:
        kind = int.__new__(cls, value)
        kind._value_, kind.form, kind.limit, kind.senders = value, form, limit, senders
        return kind

    # ---- hvdrun to an agent (runner/hosts) -------------------------------------------------------------

    ASK = 1, JSON, LONG, HVDRUN  # the job's folder and program, wishes for torch, the address for metrics
    START = 2, JSON, HUGE, HVDRUN  # everything that the ranks of this host need
    SIGNAL = 3, NOTHING, 0, HVDRUN  # its number, for `rank`; no rank: all ranks stop, or go on (Ctrl-Z)
    GRANT = 4, NOTHING, 0, HVDRUN  # how many more bytes of stream `rank`, 1 or 2, of ranks may be sent
    COLLECT = 5, NOTHING, 0, HVDRUN  # the job has failed: send failure reports as soon as they exist
    FINISH = 6, NOTHING, 0, HVDRUN  # all ranks have ended: send their remaining files, and end
    LAUNCH = 7, JSON, LONG, HVDRUN  # starts one more rank, in a job whose ranks come and go
    LEASE = 8, NOTHING, 0, HVDRUN  # the number of the ALIVE whose sender may let its ranks run on
    SPARE = 9, JSON, LONG, HVDRUN  # starts a spare, which waits for a LAUNCH; `rank` is its lane, below -1
    DISMISS = 10, NOTHING, 0, HVDRUN  # the spare in lane `rank` is not needed
    WATCH = 11, NOTHING, 0, HVDRUN  # somebody watches: send the states of the ranks, with this number
    ORDER = 12, JSON, SHORT, HVDRUN  # a recording that the ranks make (sirtaki.bindings.observing)
    REACH = 13, JSON, SHORT, HVDRUN  # starts ssh to another host; `rank` is its lane, as in the next three
    PASS = 14, BYTES, SHORT, HVDRUN  # for its input
    PASS_END = 15, NOTHING, 0, HVDRUN  # the end of its input
    DROP = 16, NOTHING, 0, HVDRUN  # the number of a signal for it

    # ---- An agent to hvdrun ----------------------------------------------------------------------------

    ANSWER = 20, JSON, LONG, AGENT  # the version, this host, what is missing here, an address for torch
    STARTED = 21, NOTHING, 0, AGENT  # the pid of `rank`
    REFUSED = 22, TEXT, SHORT, AGENT  # why `rank` could not be started
    STDOUT = 23, BYTES, SHORT, AGENT  # what `rank` has written
    STDERR = 24, BYTES, SHORT, AGENT
    ENDED = 25, JSON, SHORT, AGENT  # how `rank` ended
    REPORT = 26, BYTES, 4 << 20, AGENT  # the failure report of `rank`
    TIMELINE = 27, BYTES, SHORT, AGENT  # a piece of the timeline of `rank`
    ALIVE = 28, NOTHING, 0, AGENT  # greater each time; shows a lost connection, and asks for a LEASE
    DONE = 29, NOTHING, 0, AGENT  # the agent has left nothing behind
    LEAVING = 30, NOTHING, 0, AGENT  # the agent was asked to end (SIGTERM): its ranks leave at a commit
    WORKER_TIMELINE = 31, BYTES, SHORT, AGENT  # a piece of generation `number` (0: the changes) of a worker
    SPARE_WAITS = 32, JSON, SHORT, AGENT, STANDBY  # the modules of a spare, and their seconds; see PLACE
    SPARE_ENDED = 33, TEXT, SHORT, AGENT  # how the spare in lane `rank` ended, or why it has no process
    STATE = 34, JSON, LONG, AGENT  # the state of a rank, for the WATCH of that number, and the time there
    PASSED = 35, BYTES, SHORT, AGENT  # what the ssh in lane `rank` has written
    PASSED_ERROR = 36, BYTES, SHORT, AGENT  # the same, to its standard error
    PASSED_END = 37, JSON, SHORT, AGENT  # how it ended

    PLACE = 38, JSON, HUGE, STARTER  # variables of a spare that becomes a rank; null: not set

    # ---- A process to the rendezvous, and the answers (bindings/bootstrap) -----------------------------

    JOIN = 40, NOTHING, 0, NEWCOMER  # the job's size
    GATHER = 41, BYTES, SHORT, RANK  # a rank's part in the all-gather of that number
    EVENT = 42, TEXT, SHORT, RANK  # the place of the event among REPORTS, and its text
    FAILED = 43, TEXT, SHORT, RANK, RENDEZVOUS  # what failed first in this generation, by the fault of `rank`
    WELCOME = 44, BYTES, SHORT, RENDEZVOUS, ROOT  # the session, and a collector's route
    GATHERED = 45, BYTES, 0, RENDEZVOUS  # the lengths of all ranks' parts, and the parts
    REJECTED = 46, TEXT, SHORT, RENDEZVOUS, ROOT  # why a client is refused
    TIMED_OUT = 47, TEXT, SHORT, RENDEZVOUS  # which ranks did not come in time

    # ---- A host's collector, which numbers the connections of its ranks, and the rendezvous ------------

    JOIN_HOST = 50, BYTES, TOKEN_BYTES, NEW_COLLECTOR  # the job's size, and the token for a RESUME
    ARRIVED = 51, BYTES, SHORT, COLLECTOR  # a number, and the identity that has proved itself there
    SAID = 52, BYTES, HEADER.size + LONG, COLLECTOR  # a number, and a frame from there
    LEFT = 53, NOTHING, 0, COLLECTOR  # the number of a connection that has ended
    DELIVER = 54, BYTES, HEADER.size + LONG, ROOT  # a count of numbers; they, and a frame for all of them
    CLOSE = 55, NOTHING, 0, ROOT  # the number of a connection to close
    FLUSH = 56, NOTHING, 0, ROOT  # say when all ranks have closed their connections
    FLUSHED = 57, NOTHING, 0, COLLECTOR  # they have
    # A request to continue on a new connection, with the token of the interrupted connection and the count of
    # frames received there; the answer, with the count of the other side; during a connection, that count, so
    # that the other side drops the frames that have arrived; the final end of a connection. These four kinds
    # are not counted.
    RESUME = 58, BYTES, TOKEN_BYTES, NEW_COLLECTOR
    RESUMED = 59, NOTHING, 0, ROOT
    CONFIRM = 60, NOTHING, 0, COLLECTOR, ROOT
    GOODBYE = 61, NOTHING, 0, COLLECTOR, ROOT

    # ---- A worker and hvdrun's arbiter (elastic/messages.py); a server of tables and hvdrun ------------

    ENLIST = 70, JSON, SHORT, RANK
    RECEIVED = 71, JSON, SHORT, RANK
    COUNTED = 72, JSON, SHORT, RANK
    RETURNED = 73, JSON, SHORT, RANK
    DRAIN = 74, JSON, SHORT, RANK
    FENCE = 75, JSON, SHORT, RANK
    WORLD = 76, JSON, HUGE, LAUNCHER  # describes all members
    CHANGE = 77, JSON, SHORT, LAUNCHER
    LEAVE_AT = 78, JSON, SHORT, LAUNCHER
    OVER = 79, JSON, SHORT, LAUNCHER
    STANDING = 80, JSON, SHORT, LAUNCHER
    END = 81, JSON, SHORT, LAUNCHER
    SERVES = 82, NOTHING, 0, RANK  # a server waits for tables
    TABLE = 83, NOTHING, 0, LAUNCHER  # the number of a table, or END

    # ---- A rank that runs a function of `sirtaki.run`, and its launcher (runner/function) --------------

    HELLO = 90, JSON, SHORT, CALLER  # the rank's host, process and version of Python
    READ = 91, NOTHING, 0, CALLER  # where to read on in the call
    OUTCOME = 92, JSON, LONG, CALLER  # about the result or exception; replaces one that is not complete
    PIECE = 93, BYTES, LONG, CALLER  # a piece of it, pickled
    COMPLETE = 94, NOTHING, 0, CALLER  # the end of it
    REPLY = 95, BYTES, LONG, LAUNCHER


KINDS = {int(kind): kind for kind in MessageKind}
# Bytes by which a limit grows with each rank of the job: for a payload, its length, and a number.
PER_RANK = {MessageKind.GATHERED: SHORT + 4, MessageKind.DELIVER: SHORT + 8}
# The kinds that each sender may send.
FROM = {sender: frozenset(kind for kind in MessageKind if sender in kind.senders) for sender in Sender}


# ---- Frames --------------------------------------------------------------------------------------------

NO_RANK = -1
TEXT_LIMIT = 4000  # characters
_MAGIC = b"srt2"
_EARLIER = b"sirt"  # of the frames of sirtaki 0.2.0 and before
_STRANGER = "another process writes to the connection"


class WireError(HandshakeError):
    """The peer has sent malformed data."""


@dataclass(frozen=True)
class Frame:
    kind: MessageKind
    rank: int = NO_RANK
    payload: bytes = b""
    number: int = 0

    @classmethod
    def of(
        cls, kind: MessageKind, content: str | Mapping[str, Any], rank: int = NO_RANK, number: int = 0
    ) -> Frame:
        """Returns a frame with JSON or text, as is the form of its kind; long texts are cut."""
        text = json.dumps(content) if kind.form is Form.JSON else str(content)[:TEXT_LIMIT]
        return cls(kind, rank, text.encode(errors="replace"), number)

    def pack(self, ranks: int = 0, rest: int = 0) -> bytes:
        """Returns the frame as sent. Raises WireError if it is too long for a job of `ranks` ranks.

        `rest`: bytes of the payload that the caller adds.
        """
        length = len(self.payload) + rest
        _check_length(self.kind, length, ranks)
        return HEADER.pack(_MAGIC, self.kind, self.rank, self.number, length) + self.payload

    @property
    def text(self) -> str:
        """Returns the text in the payload, which may contain any characters."""
        return self.payload.decode(errors="replace")

    @property
    def values(self) -> dict[str, Any]:
        """Returns the JSON object in the payload. Raises WireError if it holds none."""
        try:
            values = json.loads(self.payload)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise self.malformed()
        return values

    def fields(self, **types: Any) -> list[Any]:
        """Returns all values of the JSON object in the payload, by names and types: classes, or lists of a
        class. Raises WireError.
        """
        values = self.values
        found = [values.get(name) for name in types]
        if values.keys() != types.keys() or not all(map(_is_of, found, types.values())):
            raise self.malformed()
        return found

    def unexpected(self) -> WireError:
        """Returns the error for a frame that its sender may not send now."""
        return WireError(f"{self.kind.name} is not expected now")

    def malformed(self, reason: object = "") -> WireError:
        """Returns the error for a frame with another content than it has to have."""
        return WireError(f"{self.kind.name} is malformed" + (f": {reason}" if reason else ""))


def _is_of(value: object, wanted: Any) -> bool:
    if items := get_args(wanted):
        return isinstance(value, list) and all(type(item) is items[0] for item in value)
    return type(value) is wanted


def take_frame(buffer: bytearray, accepted: Container[MessageKind], ranks: int = 0) -> Frame | None:
    """Removes the first whole frame from `buffer`; returns None while it is incomplete.

    Raises WireError if it is not of an `accepted` kind, or too long for a job of `ranks` ranks.
    """
    if len(buffer) < HEADER.size:
        _check_magic(buffer)
        return None
    kind, rank, number, length = _checked_header(buffer, accepted, ranks)
    end = HEADER.size + length
    if len(buffer) < end:
        return None
    payload = bytes(buffer[HEADER.size : end])
    del buffer[:end]
    return Frame(kind, rank, payload, number)


def _checked_header(
    header: bytes | bytearray, accepted: Container[MessageKind], ranks: int
) -> tuple[MessageKind, int, int, int]:
    _check_magic(header)
    _, value, rank, number, length = HEADER.unpack_from(header)
    if (kind := KINDS.get(value)) is None:
        raise WireError(_STRANGER)
    if kind not in accepted:
        raise Frame(kind).unexpected()
    _check_length(kind, length, ranks)
    return kind, rank, number, length


def _check_magic(beginning: bytes | bytearray) -> None:
    found = bytes(beginning[: len(_MAGIC)])
    if found == _EARLIER:
        raise WireError("it has an earlier version of sirtaki: install the same version on both")
    if not _MAGIC.startswith(found):
        raise WireError(_STRANGER)


def _check_length(kind: MessageKind, length: int, ranks: int) -> None:
    limit = kind.limit + ranks * PER_RANK.get(kind, 0)
    if length > limit:
        raise WireError(f"{kind.name} has {length} bytes where {limit} are allowed")


def send_all(connection: Connection, data: bytes, deadline: float) -> None:
    """Sends all of `data`; raises RendezvousTimeout at the deadline, EOFError if the peer is gone."""
    rest = memoryview(data)
    while rest:
        connection.settimeout(_time_left(deadline))
        try:
            rest = rest[connection.send(rest) :]
        except TimeoutError:
            raise _too_late() from None
        except ConnectionError:
            raise EOFError("the other side closed the connection") from None


def receive_exactly(connection: Connection, count: int, deadline: float) -> bytes:
    """Receives exactly `count` bytes; raises RendezvousTimeout at the deadline, EOFError at the end of the
    stream.
    """
    received = bytearray()
    while len(received) < count:
        connection.settimeout(_time_left(deadline))
        try:
            part = connection.recv(count - len(received))
        except TimeoutError:
            raise _too_late() from None
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError("the other side closed the connection")
        received += part
    return bytes(received)


def send_frame(connection: Connection, frame: Frame, deadline: float) -> None:
    """Sends a frame. Raises like `send_all`."""
    send_all(connection, frame.pack(), deadline)


def receive_frame(
    connection: Connection, deadline: float, accepted: Container[MessageKind], ranks: int = 0
) -> Frame:
    """Receives a frame. Raises like `receive_exactly` and `take_frame`."""
    header = receive_exactly(connection, HEADER.size, deadline)
    kind, rank, number, length = _checked_header(header, accepted, ranks)
    return Frame(kind, rank, receive_exactly(connection, length, deadline), number)


def printable(text: str, limit: int = 2000) -> str:
    """Makes text from another process fit for display: bounded, and without control characters."""
    shown = text[:limit]
    if shown.isprintable():  # as nearly all of it is: each rank reads the description of every other one
        return shown
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in shown)


def one_line(text: str, limit: int = 2000) -> str:
    """Works like `printable`, and joins lines: text of another process cannot pass for a line of ours."""
    return printable(" ".join(text[:limit].split()), limit)


def _time_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _too_late()
    return left


def _too_late() -> RendezvousTimeout:
    return RendezvousTimeout("the other side did not answer in time")


# ---- Bytes that wait until a non-blocking connection takes them ----------------------------------------


SHARED_BYTES = 4096  # from this size on, bytes are kept as they are instead of being copied


class SendQueue:
    """Bytes to send, in order; queues share large messages instead of copying them."""

    def __init__(self) -> None:
        self._parts: deque[bytearray | memoryview] = deque()
        self.size = 0  # bytes that wait

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __iadd__(self, data: bytes) -> SendQueue:
        self.size += len(data)
        if len(data) >= SHARED_BYTES:
            self._parts.append(memoryview(data))
        elif data and self._parts and isinstance(last := self._parts[-1], bytearray):
            last += data
        elif data:
            self._parts.append(bytearray(data))
        return self

    def send(self, connection: Connection) -> None:
        """Sends as much as fits. Raises OSError if the connection is lost."""
        while self._parts:
            part = self._parts[0]
            try:
                sent = connection.send(part)
            except BlockingIOError:
                return
            self.size -= sent
            if sent == len(part):
                self._parts.popleft()
                continue
            self._parts[0] = part[sent:]
            return

    def clear(self) -> None:
        self._parts.clear()
        self.size = 0
