"""Reads the files of a trace."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sirtaki.runner.errors import LaunchError
from sirtaki.runner.rendezvous.wire import printable
from sirtaki.runner.timeline_events import EventFile
from sirtaki.runner.trace.doings import Slices
from sirtaki.runner.trace.formats import ranks_text
from sirtaki.runner.trace.operations import Operation
from sirtaki.runner.trace.sources import Source
from sirtaki.runner.trace.trace import Failed, Row, StatedClock, Trace

_RANK = re.compile(r"(?:worker \d+, generation (\d+): )?rank (\d+) \(pid \d+ on (.*)\)")
_ROUND = re.compile(r" \(round \d+\)$")  # of an operation with a deadline; plans tell rounds apart
_CHANGES = re.compile(r"worker \d+: changes of the ranks")
_MAX_RANKS, _MAX_STATUS, _MAX_NUMBER = 1 << 16, 100, 1 << 62
_MOVING = ("PACK", "TRANSFER", "UNPACK")  # the slices of an operation's transfer


def read_trace(sources: Sequence[Source]) -> Trace:
    """Reads all files.

    Raises:
        LaunchError: a file cannot be read or is no timeline, or two are of one rank.
    """
    texts: dict[str, int] = {}
    rows: list[Row] = []
    lacks: list[str] = []
    for source in sources:
        if len(sources) > 1 and _is_empty(source.path):
            lacks.append(f"{source.path.name} is empty: its process was killed early, or the disk was full")
            continue
        reader = _Reader(source, texts)
        try:
            reader.read()
        except OSError as error:
            raise LaunchError(f"cannot read {source.path}: {error.strerror or error}") from None
        rows += reader.rows.values()
        lacks += reader.lacks()
    _refuse_twins(rows)
    trace = Trace(_numbered(rows), list(texts), lacks)
    trace.lacks += _missing_ranks(trace)
    return trace


def _is_empty(file: Path) -> bool:
    """Returns whether a file has no more than the beginning of a list."""
    try:
        return file.stat().st_size <= len("[\n")
    except OSError:
        return False  # the error is that of reading it


def _refuse_twins(rows: Sequence[Row]) -> None:
    """Raises LaunchError if two rows are of one rank: files of one job have each rank once."""
    seen: dict[tuple[int, int], Row] = {}
    for row in rows:
        if row.rank is None:
            continue
        twin = seen.setdefault((row.generation, row.rank), row)
        if twin is not row:
            raise LaunchError(
                f"{twin.source.path} and {row.source.path} are both of rank {row.rank}: name the files of "
                "one job, and a merged file without those that it was made of"
            )


def _numbered(rows: list[Row]) -> list[Row]:
    """Returns the rows in the order of the output, with their process ids there."""
    is_elastic = any(row.generation for row in rows)
    if not is_elastic:
        rows = sorted(rows, key=lambda row: row.rank or 0)
    for index, row in enumerate(rows):
        if is_elastic and row.source.part is None:  # of a merged file, whose events keep their rows
            row.output_pid = row.pid
        else:
            row.output_pid = index if is_elastic or row.rank is None else row.rank
    return rows


def _missing_ranks(trace: Trace) -> Iterator[str]:
    for rows in trace.generations():
        place = f" in generation {rows[0].generation}" if rows[0].generation else ""
        size = max((rows[-1].rank or 0) + 1, *(row.world_size for row in rows))
        missing = sorted({*range(size)} - {row.rank for row in rows if row.rank is not None})
        if missing:
            files, verb = ("file", "is") if len(missing) == 1 else ("files", "are")
            yield f"the {files} of {ranks_text(missing)} {verb} missing{place}"
        if empty := [row.rank or 0 for row in rows if not (row.operations or row.failed)]:
            yield f"there are no operations of {ranks_text(empty)}{place}"


class _Reader:
    """The rows of one file, and the operation of each row whose slices are being read."""

    def __init__(self, source: Source, texts: dict[str, int]) -> None:
        self.rows: dict[int, Row] = {}  # by the process id in the file
        self._source = source
        self._file = EventFile(source.path)
        self._texts = texts
        self._tracks: defaultdict[int, dict[int, int]] = defaultdict(dict)  # numbers of names, by track
        self._open: dict[int, _OpenOperation] = {}
        self._damaged = 0

    def read(self) -> None:
        """Raises OSError, and LaunchError if the file is no timeline."""
        for line in self._file:
            try:
                self._add(json.loads(line, parse_float=str))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                self._damaged += 1
                if not self.rows:
                    break
        if not self.rows:
            raise LaunchError(f"{self._source.path} is no timeline of sirtaki")
        for pid in tuple(self._open):
            self._close(pid)

    def lacks(self) -> Iterator[str]:
        name = self._source.path.name
        # The file of changes never has an end, because its process may be killed at any time.
        if not self._file.is_whole and any(row.rank is not None for row in self.rows.values()):
            yield f"{name} has no end: its process was killed or still runs; all that it has is used"
        if self._damaged:
            lines = "1 line is" if self._damaged == 1 else f"{self._damaged} lines are"
            yield f"{lines} damaged in {name}, and left out"

    def _add(self, event: dict[str, Any]) -> None:
        pid, phase, name, args = event["pid"], event["ph"], event["name"], event.get("args", {})
        if phase == "M" and name == "process_name":
            self.rows[pid] = self._row(pid, str(args["name"]))
        row = self.rows[pid]
        if phase == "M" and name == "thread_name":
            self._tracks[pid][event["tid"]] = self._number(_ROUND.sub("", str(args["name"])))
        elif phase == "M" and name == "world":
            row.world_size = min(int(args["size"]), _MAX_RANKS)
        elif phase == "M" and name == "clock":
            row.clock = _stated_clock(args)
        elif phase == "X" and event.get("cat") == "program":
            self._add_program(row, event, printable(name))
        elif phase == "X" and "plan" in args:
            self._close(pid)
            self._open[pid] = _opened(event, self._tracks[pid][event["tid"]], self._number(name))
        elif phase == "X" and pid in self._open:
            self._open[pid].add_slice(event)

    def _add_program(self, row: Row, event: dict[str, Any], what: str) -> None:
        """Adds a slice of the program, whose pauses are named as their tracks."""
        is_pause = self._texts.get(what) == self._tracks[row.pid][event["tid"]]
        slices = row.program.setdefault((event["tid"], what), Slices(what, is_pause))
        begin = _nanoseconds(event["ts"])
        slices.append(begin, begin + _nanoseconds(event["dur"]))

    def _row(self, pid: int, title: str) -> Row:
        of_rank, part = _RANK.fullmatch(title), self._source.part
        if of_rank is None and _CHANGES.fullmatch(title) is None:
            raise ValueError("neither a rank nor a worker")
        row = Row(self._source, pid, printable(title))
        if of_rank is not None:
            row.rank, row.host = int(of_rank[2]), printable(of_rank[3])
            row.generation = int(of_rank[1] or 0) or (part.generation if part else 0)
            if row.rank >= _MAX_RANKS:
                raise ValueError("no rank")
        return row

    def _number(self, text: str) -> int:
        return self._texts.setdefault(printable(text), len(self._texts))

    def _close(self, pid: int) -> None:
        """Adds the operation of a row whose slices have been read."""
        if (read := self._open.pop(pid, None)) is None:
            return
        row, operation = self.rows[pid], read.operation
        if read.status != "ok":
            row.failed.append(Failed(operation.name, operation.kind, operation.bytes, read.status))
        elif operation.plan and read.is_whole:
            row.operations.append(operation)


@dataclass
class _OpenOperation:
    """An operation whose slices follow it in the file."""

    operation: Operation
    status: str
    has_slices: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether its slices are known: the core writes one for any duration."""
        return self.has_slices or self.operation.submitted == self.operation.ended

    def add_slice(self, event: dict[str, Any]) -> None:
        begin, name = _nanoseconds(event["ts"]), event["name"]
        end = begin + _nanoseconds(event["dur"])
        if event["tid"] != self.operation.track:
            return
        if not begin <= end < _MAX_NUMBER:
            raise OverflowError
        self.has_slices = True
        if name == "NEGOTIATE":
            self.operation = self.operation._replace(decided=end)
        elif name in _MOVING and not self.operation.started:
            self.operation = self.operation._replace(started=begin)


def _opened(event: dict[str, Any], name: int, kind: int) -> _OpenOperation:
    """Returns the operation of an event. Raises what a malformed event raises."""
    args, begin = event["args"], _nanoseconds(event["ts"])
    operation = Operation(
        plan=int(args["plan"]),
        name=name,
        kind=kind,
        process_set=int(args["process_set"]),
        fused=int(args["fused"]),
        bytes=int(args["bytes"]),
        track=int(event["tid"]),
        submitted=begin,
        decided=begin,
        started=0,
        ended=begin + _nanoseconds(event["dur"]),
    )
    if not all(0 <= number < _MAX_NUMBER for number in operation):
        raise OverflowError
    return _OpenOperation(operation, printable(str(args["status"]), _MAX_STATUS))


def _stated_clock(args: dict[str, Any]) -> StatedClock:
    wall, error = args.get("wall_minus_monotonic_ns"), args.get("error_ns")
    return StatedClock(
        None if wall is None else int(wall),
        "offset_ns" in args,
        int(args.get("offset_ns", 0)),
        None if error is None else int(error),
    )


def _nanoseconds(microseconds: str | int) -> int:
    """Converts a time without rounding: of 2**33 µs, a float has not all the nanoseconds."""
    whole, _, part = str(microseconds).partition(".")
    return int(whole) * 1000 + int(part.ljust(3, "0")[:3] or 0)
