"""What hvdrun and the agent on another host say to each other over ssh, and how it is written.

The agent begins with START_MARK: what comes before it was printed by the login, and means nothing. Then, both
ways, frames: a fixed header (magic, kind, rank, length) and a payload that is no longer than its kind allows.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

START_MARK = b"\0sirtaki agent\0\n"
MOST_BEFORE_MARK = 64 * 1024  # bytes that a login may print
ROOM = 256 * 1024  # bytes of ranks' output that an agent sends before hvdrun says that there is room again
LAST_WORDS = (
    1024 * 1024
)  # bytes of each stream of a rank beyond that, once all ranks have ended: what a pipe holds
_MAGIC = b"sirt"
_HEADER = struct.Struct("!4sBiI")  # magic, kind, rank (or a number), length of the payload
_NUMBER = struct.Struct("!I")


class Kind(enum.IntEnum):
    """What a frame is. `rank` in its header is the rank meant, where there is one."""

    # To the agent
    ASK = 1  # JSON: the folder and the program that the job needs
    START = 2  # JSON: all that the ranks of this host need
    SIGNAL = 3  # a number: the signal for `rank`
    GRANT = 4  # a number: so many bytes more may come of all ranks' output; `rank` says which, 1 or 2
    COLLECT = 5  # the job has failed: send what ranks write about it as soon as it is there
    FINISH = 6  # all ranks have ended: send what they have left, and end
    # From the agent
    ANSWER = 20  # JSON: the version, this host, and what is missing here
    STARTED = 21  # a number: the process of `rank`
    REFUSED = 22  # text: why `rank` could not be started
    STDOUT = 23  # bytes that `rank` has written
    STDERR = 24
    ENDED = 25  # JSON: how `rank` ended
    REPORT = 26  # what `rank` did when the job failed
    TIMELINE = 27  # a piece of the timeline of `rank`
    ALIVE = 28  # nothing, so that a lost connection is noticed
    DONE = 29  # the agent has left nothing behind


LIMITS = {Kind.START: 16 << 20, Kind.ASK: 1 << 20, Kind.ANSWER: 1 << 20, Kind.REPORT: 4 << 20}
_SHORT = 64 * 1024 + 64


class WireError(Exception):
    """The other side sent what makes no sense."""


@dataclass(frozen=True)
class Frame:
    kind: Kind
    rank: int = -1
    payload: bytes = b""

    def pack(self) -> bytes:
        limit = LIMITS.get(self.kind, _SHORT)
        if len(self.payload) > limit:
            raise WireError(f"{self.kind.name} has {len(self.payload)} bytes where {limit} are allowed")
        return _HEADER.pack(_MAGIC, self.kind, self.rank, len(self.payload)) + self.payload

    @classmethod
    def of_number(cls, kind: Kind, rank: int, number: int) -> Frame:
        return cls(kind, rank, _NUMBER.pack(number))

    @classmethod
    def of_values(cls, kind: Kind, values: Mapping[str, Any], rank: int = -1) -> Frame:
        return cls(kind, rank, json.dumps(values).encode())

    @property
    def number(self) -> int:
        """Raises WireError if the payload is none."""
        if len(self.payload) != _NUMBER.size:
            raise WireError(f"{self.kind.name} has to have a number")
        return int(_NUMBER.unpack(self.payload)[0])

    @property
    def values(self) -> dict[str, Any]:
        """Raises WireError if the payload is no JSON object."""
        try:
            values = json.loads(self.payload)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise WireError(f"{self.kind.name} makes no sense")
        return values


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self, mark: bytes = b"") -> None:
        self._mark = mark  # that is still awaited
        self._buffer = bytearray()
        self.before_mark = b""

    @property
    def started(self) -> bool:
        """Whether the mark has come."""
        return not self._mark

    def take(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole with this. Raises WireError for what is none, and beyond a limit."""
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
        self.before_mark = before[-MOST_BEFORE_MARK:]
        if mark:
            self._buffer[:] = rest
            self._mark = b""
        elif len(before) > MOST_BEFORE_MARK:
            raise WireError(f"the login there has printed more than {MOST_BEFORE_MARK} bytes")
        return bool(mark)

    def _checked_header(self) -> tuple[Kind, int, int]:
        magic, number, rank, length = _HEADER.unpack_from(self._buffer)
        try:
            kind = Kind(number)
        except ValueError:
            kind = None
        if magic != _MAGIC or kind is None:
            raise WireError("something else writes into the connection")
        if length > LIMITS.get(kind, _SHORT):
            raise WireError(f"{kind.name} has {length} bytes where {LIMITS.get(kind, _SHORT)} are allowed")
        return kind, rank, length
