"""The protocol between hvdrun and the agent on another host, over ssh or srun.

The agent begins with START_MARK: output before it comes from the login and is ignored. Frames follow, in both
directions: a fixed header (magic, kind, rank, length) and a payload whose length is limited for each kind.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

START_MARK = b"\0sirtaki agent\0\n"
MAX_BEFORE_MARK = 64 * 1024  # bytes that a login may print
INITIAL_CREDIT = 256 * 1024  # bytes of ranks' output that an agent may send before hvdrun grants more
# Further bytes for each stream of a rank once all ranks have ended: the capacity of a pipe.
FINAL_CREDIT = 1024 * 1024
_MAGIC = b"sirt"
NO_RANK = -1

_HEADER = struct.Struct("!4sBiI")  # magic, kind, rank (or a number), length of the payload
_NUMBER = struct.Struct("!I")


@enum.unique
class MessageKind(enum.IntEnum):
    """The kind of a frame. `rank` in its header is the rank that it is about, if any."""

    # To the agent
    ASK = 1  # JSON: the job's folder and program, whether torch's variables are set, the address for metrics
    START = 2  # JSON: everything that the ranks of this host need
    SIGNAL = 3  # a number: the signal for `rank`; of no rank: all ranks are stopped, or go on (Ctrl-Z)
    GRANT = 4  # a number: how many more bytes of the ranks' output may be sent; `rank` is the stream, 1 or 2
    COLLECT = 5  # the job has failed: send ranks' failure reports as soon as they exist
    FINISH = 6  # all ranks have ended: send their remaining files, and end
    LAUNCH = 7  # JSON: starts one more rank, in a job whose ranks come and go; `rank` is its place there
    LEASE = 8  # a number: the ALIVE whose sender may let its ranks run on
    SPARE = 9  # JSON: starts a spare, which waits for a LAUNCH that names it; `rank` is its lane, below -1
    DISMISS = 10  # the spare in lane `rank` is not needed
    WATCH = 11  # a number: somebody watches the job; send the states of the ranks here, with this number
    ORDER = 12  # JSON: a recording that the ranks here are to make (sirtaki.bindings.observing.watch_marks)
    REACH = 13  # JSON: starts a process of ssh to another host; `rank` is its lane, as in the next three
    PASS = 14  # bytes for its input
    PASS_END = 15  # the end of its input
    DROP = 16  # a number: a signal for it
    # From the agent
    ANSWER = 20  # JSON: the version, this host, what is missing here, and a port and an address for torch
    STARTED = 21  # a number: the pid of `rank`
    REFUSED = 22  # text: why `rank` could not be started
    STDOUT = 23  # bytes that `rank` has written
    STDERR = 24
    ENDED = 25  # JSON: how `rank` ended
    REPORT = 26  # the failure report of `rank`
    TIMELINE = 27  # a piece of the timeline of `rank`
    ALIVE = 28  # a number, greater each time; lets hvdrun notice a lost connection, and asks for a LEASE
    DONE = 29  # the agent has left nothing behind
    LEAVING = 30  # the agent was asked to end (SIGTERM): its ranks leave at the next commit
    WORKER_TIMELINE = 31  # a generation (0: the changes) and a piece of its timeline; `rank` is the worker
    SPARE_WAITS = 32  # JSON: the modules of the spare in lane `rank`, and the seconds that their import took
    SPARE_ENDED = 33  # text: how the spare in lane `rank` ended, or why it could not be started
    STATE = 34  # JSON: the state of a rank, for the WATCH of that number, and the time there
    PASSED = 35  # bytes that the process of ssh in lane `rank` has written
    PASSED_ERROR = 36  # the same, to its standard error
    PASSED_END = 37  # JSON: how it ended


TO_RELAY = (
    MessageKind.REACH,
    MessageKind.PASS,
    MessageKind.PASS_END,
    MessageKind.DROP,
)  # about processes that an agent holds for hvdrun
FROM_RELAY = (MessageKind.PASSED, MessageKind.PASSED_ERROR, MessageKind.PASSED_END)
LIMITS = {
    MessageKind.START: 16 << 20,
    MessageKind.ASK: 1 << 20,
    MessageKind.LAUNCH: 1 << 20,
    MessageKind.SPARE: 1 << 20,
    MessageKind.ANSWER: 1 << 20,
    MessageKind.REPORT: 4 << 20,
    MessageKind.STATE: 1 << 20,
}
_SHORT = 64 * 1024 + 64


class WireError(Exception):
    """The error raised when the peer has sent malformed data."""


@dataclass(frozen=True)
class Frame:
    kind: MessageKind
    rank: int = NO_RANK
    payload: bytes = b""

    def pack(self) -> bytes:
        limit = LIMITS.get(self.kind, _SHORT)
        if len(self.payload) > limit:
            raise WireError(f"{self.kind.name} has {len(self.payload)} bytes where {limit} are allowed")
        return _HEADER.pack(_MAGIC, self.kind, self.rank, len(self.payload)) + self.payload

    @classmethod
    def of_number(cls, kind: MessageKind, rank: int, number: int) -> Frame:
        return cls(kind, rank, _NUMBER.pack(number))

    @classmethod
    def of_piece(cls, kind: MessageKind, rank: int, number: int, piece: bytes) -> Frame:
        return cls(kind, rank, _NUMBER.pack(number) + piece)

    @classmethod
    def of_values(cls, kind: MessageKind, values: Mapping[str, Any], rank: int = -1) -> Frame:
        return cls(kind, rank, json.dumps(values).encode())

    @property
    def number(self) -> int:
        """Returns the number in the payload. Raises WireError if it holds none."""
        if len(self.payload) != _NUMBER.size:
            raise WireError(f"{self.kind.name} must contain a number")
        return int(_NUMBER.unpack(self.payload)[0])

    @property
    def numbered(self) -> tuple[int, bytes]:
        """Splits the payload into the number at its beginning and the rest.

        Raises WireError if it is too short.
        """
        if len(self.payload) < _NUMBER.size:
            raise WireError(f"{self.kind.name} must begin with a number")
        return int(_NUMBER.unpack_from(self.payload)[0]), self.payload[_NUMBER.size :]

    @property
    def values(self) -> dict[str, Any]:
        """Returns the JSON object in the payload. Raises WireError if it holds none."""
        try:
            values = json.loads(self.payload)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise WireError(f"{self.kind.name} is malformed")
        return values


class FrameReader:
    """A parser that cuts a stream of bytes into frames."""

    def __init__(self, mark: bytes = b"") -> None:
        self._mark = mark  # the part of the mark that is still expected
        self._buffer = bytearray()
        self.before_mark = b""

    @property
    def started(self) -> bool:
        """Returns whether the mark has arrived."""
        return not self._mark

    def take(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames that `data` completes. Raises WireError if a frame is malformed or too long."""
        self._buffer += data
        if self._mark and not self._find_mark():
            return
        while len(self._buffer) >= _HEADER.size:
            kind, rank, length = self._checked_header()
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Frame(kind, rank, payload)

    def _find_mark(self) -> bool:
        before, mark, rest = bytes(self._buffer).partition(self._mark)
        self.before_mark = before[-MAX_BEFORE_MARK:]
        if mark:
            self._buffer[:] = rest
            self._mark = b""
        elif len(before) > MAX_BEFORE_MARK:
            raise WireError(f"the login there has printed more than {MAX_BEFORE_MARK} bytes")
        return bool(mark)

    def _checked_header(self) -> tuple[MessageKind, int, int]:
        magic, number, rank, length = _HEADER.unpack_from(self._buffer)
        try:
            kind = MessageKind(number)
        except ValueError:
            kind = None
        if magic != _MAGIC or kind is None:
            raise WireError("another process writes to the connection")
        if length > LIMITS.get(kind, _SHORT):
            raise WireError(f"{kind.name} has {length} bytes where {LIMITS.get(kind, _SHORT)} are allowed")
        return kind, rank, length
