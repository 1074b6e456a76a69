"""The launcher's side of a call: gives the function to the ranks, and keeps what they return.

The results go to a file in memory that `sirtaki.run` has opened: their bytes as they come, then a summary in
JSON that says whose they are, then the length of that summary.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, printable
from sirtaki.bindings.bootstrap.job import RendezvousError

PIECE_BYTES = MessageKind.PIECE.limit
_LENGTH = struct.Struct("!Q")


@dataclass
class RankEnd:
    """The outcome of a rank.

    Attributes:
        host, pid: its process.
        report: what it says about its result or its exception; see `worker`.
        extents: the places of the pickled result or exception in the file, as offsets and lengths.
        is_complete: whether all of it has come.
    """

    host: str
    pid: int
    report: dict[str, Any] = field(default_factory=dict)
    extents: list[tuple[int, int]] = field(default_factory=list)
    is_complete: bool = False


@dataclass
class Summary:
    """The result of a job.

    Attributes:
        error: why the job did not start, or could not go on; "" if it did.
        failure: the failure of the job in a sentence; None if it did not fail.
        culprit: the rank whose exception caused the failure, if one did.
        outcomes: by rank; in an elastic job, by the number of the worker.
        size: the number of ranks; 0 in an elastic job.
        last_ranks: in an elastic job, the last rank of each worker.
    """

    error: str = ""
    failure: str | None = None
    culprit: int | None = None
    outcomes: dict[int, RankEnd] = field(default_factory=dict)
    size: int = 0
    last_ranks: dict[int, int] = field(default_factory=dict)


class FunctionService:
    """Answers the requests of ranks. `call` and `results` are descriptors of files.

    `path` is the module search path for the ranks, `python` the version of Python that they have to have.
    """

    def __init__(self, call: int, results: int, path: Sequence[str], python: str) -> None:
        self._call = call
        self._results = results
        self._end = 0  # of the results written so far
        self._path = list(path)
        self._python = python
        self._summary = Summary()

    def answer(self, rank: int, request: Frame) -> bytes:
        """Returns the answer to an authenticated rank's request. Raises RendezvousError."""
        kind = request.kind
        if kind == MessageKind.HELLO:
            return self._welcome(rank, *request.fields(host=str, pid=int, python=str))
        outcome = self._summary.outcomes.get(rank)
        if outcome is None or outcome.is_complete:
            raise request.unexpected()
        if kind == MessageKind.READ and request.number <= os.fstat(self._call).st_size:
            return os.pread(self._call, PIECE_BYTES, request.number)
        if kind == MessageKind.OUTCOME:
            outcome.report = request.values
            outcome.extents.clear()
        elif kind == MessageKind.PIECE and outcome.report:
            self._store(outcome, request.payload)
        elif kind == MessageKind.COMPLETE and outcome.report:
            outcome.is_complete = True
        else:
            raise request.unexpected()
        return b""

    def note_size(self, size: int) -> None:
        """Sets the number of ranks of a non-elastic job."""
        self._summary.size = size

    def note_ranks(self, last_ranks: Mapping[int, int]) -> None:
        """Sets the last rank of each worker of an elastic job."""
        self._summary.last_ranks.update(last_ranks)

    def has_outcome(self, rank: int | None) -> bool:
        """Returns whether a rank has sent its result or its exception."""
        outcome = None if rank is None else self._summary.outcomes.get(rank)
        return outcome is not None and outcome.is_complete

    def note_failure(self, text: str, culprit: int | None) -> None:
        """Sets how the job has failed."""
        self._summary.failure, self._summary.culprit = text, culprit

    def note_error(self, text: str) -> None:
        """Sets why the job has no results; the first error counts."""
        self._summary.error = self._summary.error or text

    def close(self) -> None:
        """Writes the summary. The job has ended."""
        summary = json.dumps(asdict(self._summary)).encode()
        self._write(summary + _LENGTH.pack(len(summary)))

    def _welcome(self, rank: int, host: str, pid: int, python: str) -> bytes:
        host, python = printable(host, 255), printable(python, 255)
        if python != self._python:
            text = (
                f"rank {rank} on {host} runs {python}, but the function comes from {self._python}, whose "
                "functions it cannot load: use the same version on all hosts"
            )
            self.note_error(text)
            raise RendezvousError(text)
        self._summary.outcomes[rank] = RankEnd(host, pid)
        return json.dumps({"size": os.fstat(self._call).st_size, "path": self._path}).encode()

    def _store(self, outcome: RankEnd, piece: bytes) -> None:
        try:
            offset = self._write(piece)
        except OSError as error:
            self.note_error(f"the results cannot be kept in the memory of the launcher: {error.strerror}")
            raise RendezvousError("the launcher has no memory for the results") from None
        outcome.extents.append((offset, len(piece)))

    def _write(self, data: bytes) -> int:
        offset, rest = self._end, memoryview(data)
        while rest:
            written = os.pwrite(self._results, rest, self._end)
            self._end += written
            rest = rest[written:]
        return offset


def read_summary(results: int) -> Summary | None:
    """Returns the summary in a results file; None if the launcher exited before writing it."""
    end = os.fstat(results).st_size - _LENGTH.size
    if end < 0:
        return None
    length = _LENGTH.unpack(os.pread(results, _LENGTH.size, end))[0]
    if length > end:
        return None
    try:
        values = json.loads(os.pread(results, length, end - length))
        return _unpack(values)
    except (ValueError, TypeError, KeyError):
        return None


def _unpack(values: Mapping[str, Any]) -> Summary:
    """Returns a summary from JSON, in which all keys are strings and tuples are lists."""
    outcomes = {int(rank): RankEnd(**outcome) for rank, outcome in values["outcomes"].items()}
    last_ranks = {int(worker): rank for worker, rank in values["last_ranks"].items()}
    return Summary(**{**values, "outcomes": outcomes, "last_ranks": last_ranks})


def read_outcome(results: int, outcome: RankEnd) -> bytearray:
    """Returns the bytes of a rank's outcome."""
    data = bytearray(sum(length for _, length in outcome.extents))
    view, position = memoryview(data), 0
    for offset, length in outcome.extents:
        position += os.preadv(results, [view[position : position + length]], offset)
    return data
