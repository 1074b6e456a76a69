"""Reads the files of a trace."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sirtaki.bindings.bootstrap.connection.wire import MessageKind, printable
from sirtaki.runner.launch.errors import LaunchError, explained
from sirtaki.runner.observe.timeline import clock_offset, shifted
from sirtaki.runner.observe.timeline_events import EventFile, in_microseconds
from sirtaki.runner.supervise.post_mortem import MALFORMED, describe, place_of
from sirtaki.runner.trace.doings import Slices
from sirtaki.runner.trace.formats import ranks_text
from sirtaki.runner.trace.sources import Meter, Show, Source, show_nothing
from sirtaki.runner.trace.trace import Ending, Failed, ProcessRow, RecordedOperation, StatedClock, Trace


def read_trace(sources: Sequence[Source], show: Show = show_nothing) -> Trace:
    """Reads all files; `show` receives how much of them has been read.

    Raises:
        LaunchError: a file cannot be read or is no timeline, or two are of one rank.
    """
    meter = Meter("reading", [source.path for source in sources], show)
    readers: list[FileReader] = []
    texts: dict[str, int] = {}
    lacks: list[str] = []
    for source in sorted(sources, key=lambda source: source.is_report):  # timelines first
        if len(sources) > 1 and _is_empty(source.path):
            lacks.append(f"{source.path.name} is empty: its process was killed early, or the disk was full")
            continue
        with explained(f"cannot read {source.path}"):
            if source.is_report:
                lacks += _add_report(source, readers, texts)
            else:
                readers.append(FileReader(source, texts))
                readers[-1].read(meter)
    rows = [row for reader in readers for row in reader.rows.values()]
    _refuse_twins(rows)
    trace = Trace(
        _numbered(rows), list(texts), [*lacks, *(text for reader in readers for text in reader.lacks())]
    )
    trace.lacks += _missing_ranks(trace)
    return trace


def _add_report(source: Source, readers: list[FileReader], texts: dict[str, int]) -> Iterator[str]:
    """Adds the events of a failure report to the row of its rank, or to a new row; yields what it lacks.

    Raises OSError and LaunchError.
    """
    report = read_failure_report(source.path)
    found = [(reader, row) for reader in readers for row in reader.rows.values() if row.rank == report.rank]
    same = [(reader, row) for reader, row in found if row.title.endswith(printable(report.title))]
    if same:
        reader, row = max(same, key=lambda pair: pair[1].generation)  # the last world of the process
        if row.ending is None:
            reader.add_report(report, row)
    elif any(row.generation for reader in readers for row in reader.rows.values()):
        yield f"{source.path.name} is left out: no timeline tells the generation of its process"
    elif found:
        raise LaunchError(
            f"{found[0][1].source.path} and {source.path} are of two processes of rank {report.rank}: name "
            "the files of one job"
        )
    else:  # beside the file that hvdrun has merged, on the clock of that
        merged = next((reader for reader in readers if len(reader.rows) > 1), None)
        if merged is None:
            readers.append(merged := FileReader(source, texts))
        merged.add_report(report, None)


def _is_empty(file: Path) -> bool:
    """Returns whether a file has no more than the beginning of a list."""
    try:
        return file.stat().st_size <= len("[\n")
    except OSError:
        return False  # the error is that of reading it


def _refuse_twins(rows: Sequence[ProcessRow]) -> None:
    """Raises LaunchError if two rows are of the same rank: files of a job have each rank once."""
    seen: dict[tuple[int, int], ProcessRow] = {}
    for row in rows:
        if row.rank is None:
            continue
        twin = seen.setdefault((row.generation, row.rank), row)
        if twin is not row:
            raise LaunchError(
                f"{twin.source.path} and {row.source.path} are both of rank {row.rank}: name the files of "
                "one job, and a merged file without those that it was made of"
            )


def _numbered(rows: list[ProcessRow]) -> list[ProcessRow]:
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
        if empty := [row.rank or 0 for row in rows if not (row.operations or row.failed or row.ending)]:
            yield f"there are no operations of {ranks_text(empty)}{place}"


# ---- Reads one file of a trace -------------------------------------------------------------------------

_RANK = re.compile(r"(?:worker \d+, generation (\d+): )?rank (\d+) \(pid \d+ on (.*)\)")
_ROUND = re.compile(r" \(round \d+\)$")  # of an operation with a deadline; plans tell rounds apart
_CHANGES = re.compile(r"worker \d+: changes of the ranks")
_MAX_RANKS = 1 << 16


class FileReader:
    """Reads a file's rows, and for each row keeps the operation for which slices are being read."""

    def __init__(self, source: Source, texts: dict[str, int]) -> None:
        self.rows: dict[int, ProcessRow] = {}  # by the process id in the file
        self._source = source
        self._file = EventFile(source.path)
        self._texts = texts
        self._tracks: defaultdict[int, dict[int, int]] = defaultdict(dict)  # numbers of names, by track
        self._open: dict[int, OpenOperation] = {}
        self._damaged = 0

    def read(self, meter: Meter) -> None:
        """Raises OSError, and LaunchError if the file is no timeline."""
        for line in meter.lines(self._file):
            self._add_line(line)
            if not self.rows:
                break
        if not self.rows:
            raise LaunchError(f"{self._source.path} is no timeline of sirtaki")
        self._close_all()

    def add_report(self, report: FailureReport, row: ProcessRow | None) -> None:
        """Adds the events of a failure report to the row of its rank; None: to a new row.

        Raises LaunchError if it is malformed.
        """
        offset = self._offset(report, row)
        pid = report.rank if row is None else row.pid
        names = list(self._texts)
        tracks = {names[name]: track for track, name in self._tracks[pid].items()}
        ends = {track: end - offset for track, end in (row.ends_of_tracks() if row else {}).items()}
        events = ReportEvents(pid, tracks, ends)
        reported = (*report.finished, *report.unfinished)
        missing = [
            operation for operation in reported if row is None or not self._is_known(operation, row, offset)
        ]
        lines = [*([] if row else events.head(report)), *events.body(report, missing)]
        moved = [shifted(line, offset) if offset else line for line in lines]
        for line in moved:
            self._add_line(line)
        self._close_all()
        if pid not in self.rows:
            raise LaunchError(f"{self._source.path} is no failure report of a rank")
        self.rows[pid].added += moved

    def lacks(self) -> Iterator[str]:
        name = self._source.path.name
        # The file of changes never has an end, because its process may be killed at any time.
        if (
            not self._source.is_report
            and not self._file.is_whole
            and any(row.rank is not None for row in self.rows.values())
        ):
            yield f"{name} has no end: its process was killed or still runs; all that it has is used"
        if self._damaged:
            lines = "1 line is" if self._damaged == 1 else f"{self._damaged} lines are"
            yield f"{lines} damaged in {name}, and left out"

    def _offset(self, report: FailureReport, row: ProcessRow | None) -> int:
        """Returns how far the times of a rank have been moved in this file, in nanoseconds.

        An operation that its report has, too, tells that. Without one, hvdrun has moved the times in a file
        of several ranks by the wall clocks.
        """
        for operation in reversed(report.finished if row else ()):
            end = row.operations.end_of(operation.get("plan", 0), self._name(operation)) if row else None
            if end is not None:
                return end - int(operation["ended_ns"])
        first = next(iter(self.rows.values()), None)
        if first is None or len(self.rows) < 2 or first.clock.is_merged:
            return row.clock.offset if row else 0
        return clock_offset(first.clock.wall_minus_monotonic, report.wall_minus_monotonic)

    def _is_known(self, reported: Reported, row: ProcessRow, offset: int) -> bool:
        """Returns whether the file has an operation of a report."""
        name = self._name(reported)
        if row.operations.end_of(reported.get("plan", 0), name) is not None:
            return True
        times = (int(reported["submitted_ns"]) + offset, int(reported.get("ended_ns", 0)) + offset)
        failed = (failed.operation for failed in row.failed if failed.operation.name == name)
        return any(operation.submitted == times[0] or operation.ended == times[1] for operation in failed)

    def _name(self, reported: Reported) -> int:
        return self._number(_ROUND.sub("", reported["name"]))

    def _add_line(self, line: bytes) -> None:
        try:
            self._add(json.loads(line, parse_float=str))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
            self._damaged += 1

    def _close_all(self) -> None:
        for pid in tuple(self._open):
            self._close(pid)

    def _add(self, event: dict[str, Any]) -> None:
        pid, phase, name, args = event["pid"], event["ph"], event["name"], event.get("args", {})
        category = event.get("cat")
        if phase == "M" and name == "process_name":
            self.rows[pid] = self._row(pid, str(args["name"]))
        row = self.rows[pid]
        if phase == "M" and name == "thread_name":
            self._tracks[pid][event["tid"]] = self._number(_ROUND.sub("", str(args["name"])))
        elif phase == "M" and name == "world":
            row.world_size = min(int(args["size"]), _MAX_RANKS)
        elif phase == "M" and name == "clock":
            row.clock = read_clock(args)
        elif phase == "X" and category == "program":
            self._add_program(row, event, printable(name))
        elif category == ENDING:
            row.ending = read_ending(args)
        elif category == UNFINISHED:
            return
        elif phase == "X" and "plan" in args:
            self._close(pid)
            self._open[pid] = opened(event, self._tracks[pid][event["tid"]], self._number(name))
        elif phase == "X" and pid in self._open:
            self._open[pid].add_slice(event)

    def _add_program(self, row: ProcessRow, event: dict[str, Any], what: str) -> None:
        """Adds a slice of the program; a pause has the same name as its track."""
        is_pause = self._texts.get(what) == self._tracks[row.pid][event["tid"]]
        slices = row.program.setdefault((event["tid"], what), Slices(what, is_pause))
        begin = nanoseconds(event["ts"])
        slices.append(begin, begin + nanoseconds(event["dur"]))

    def _row(self, pid: int, title: str) -> ProcessRow:
        of_rank, part = _RANK.fullmatch(title), self._source.part
        if of_rank is None and _CHANGES.fullmatch(title) is None:
            raise ValueError("neither a rank nor a worker")
        row = ProcessRow(self._source, pid, printable(title))
        if of_rank is not None:
            row.rank, row.host = int(of_rank[2]), printable(of_rank[3])
            row.generation = int(of_rank[1] or 0) or (part.generation if part else 0)
            if row.rank >= _MAX_RANKS:
                raise ValueError("no rank")
        return row

    def _number(self, text: str) -> int:
        return self._texts.setdefault(printable(text), len(self._texts))

    def _close(self, pid: int) -> None:
        """Adds a row's open operation: all its slices have been read."""
        if (read := self._open.pop(pid, None)) is None:
            return
        row, operation = self.rows[pid], read.operation
        if read.status != "ok":
            row.failed.append(Failed(operation, read.status, read.error, read.place))
        elif operation.plan and read.is_whole:
            row.operations.append(operation)


# ---- The events of a timeline --------------------------------------------------------------------------

_MAX_STATUS, _MAX_NUMBER = 100, 1 << 62
_MOVING = ("PACK", "TRANSFER", "UNPACK")  # the slices of an operation's transfer


@dataclass
class OpenOperation:
    """An operation with its slices still to be read from the file."""

    operation: RecordedOperation
    status: str
    error: str  # with a mismatch
    place: str  # of the program, with a mismatch
    has_slices: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all its slices have been read: the core writes a slice for every duration but 0."""
        return self.has_slices or self.operation.submitted == self.operation.ended

    def add_slice(self, event: dict[str, Any]) -> None:
        begin, name = nanoseconds(event["ts"]), event["name"]
        end = begin + nanoseconds(event["dur"])
        if event["tid"] != self.operation.track:
            return
        if not begin <= end < _MAX_NUMBER:
            raise OverflowError
        self.has_slices = True
        if name == "NEGOTIATE":
            self.operation = self.operation._replace(decided=end)
        elif name in _MOVING and not self.operation.started:
            self.operation = self.operation._replace(started=begin)


def opened(event: dict[str, Any], name: int, kind: int) -> OpenOperation:
    """Returns the operation of an event. Raises what a malformed event raises."""
    args, begin = event["args"], nanoseconds(event["ts"])
    operation = RecordedOperation(
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
        ended=begin + nanoseconds(event["dur"]),
    )
    if not all(0 <= number < _MAX_NUMBER for number in operation):
        raise OverflowError
    error, place = printable(str(args.get("error", ""))), printable(place_of(args.get("stack", [])))
    return OpenOperation(operation, printable(str(args["status"]), _MAX_STATUS), error, place)


def read_ending(args: dict[str, Any]) -> Ending:
    texts = {name: printable(str(args[name])) for name in ("status", "reason", "doing")}
    return Ending(culprit=int(args["culprit"]), **texts)


def read_clock(args: dict[str, Any]) -> StatedClock:
    wall, error = args.get("wall_minus_monotonic_ns"), args.get("error_ns")
    return StatedClock(
        None if wall is None else int(wall),
        "offset_ns" in args,
        int(args.get("offset_ns", 0)),
        None if error is None else int(error),
    )


def nanoseconds(microseconds: str | int) -> int:
    """Converts a time without rounding: of 2**33 µs, a float has not all the nanoseconds."""
    whole, _, part = str(microseconds).partition(".")
    return int(whole) * 1000 + int(part.ljust(3, "0")[:3] or 0)


# ---- Failure reports, as events of a timeline ----------------------------------------------------------
# The last operations of a rank, and the failure of its world.
#
# A rank that has a timeline, too, gets the operations that are missing there: the core writes a timeline
# a few times a second, and those in flight never. Times are those of the same monotonic clock.


UNFINISHED, ENDING = "unfinished", "failure report"  # categories of events that only reports have
_DECISIONS = 0  # the track of a rank as a whole
_TIMES = ("submitted_ns", "agreed_ns", "moved_ns", "ended_ns")
_FACTS = ("bytes", "process_set", "plan", "fused")
_FIRST_PROGRAM_TRACK = 1_000_000_000  # those of tensors count from 1
_MAX_REPORTED_NUMBER = 1 << 62
Reported = Mapping[str, Any]  # an operation as a report has it


class FailureReport:
    """A rank's report of its world's failure. Times are in nanoseconds of the host's monotonic clock.

    Attributes:
        rank, size: its number, and the number of ranks.
        title: how timelines name the rank.
        moment: when it was written.
        wall_minus_monotonic: the difference of the host's clocks.
        finished, unfinished: its last operations that had ended, and those in flight, the oldest first.
        ending: the failure.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises an exception of `MALFORMED` if the values are not a failure report."""
        self.rank, self.size = int(values["rank"]), int(values["size"])
        self.title = f"rank {self.rank} (pid {int(values['pid'])} on {printable(str(values['host']))})"
        self.moment = _number(values["clock"]["monotonic_ns"])
        self.wall_minus_monotonic = int(values["clock"]["wall_minus_monotonic_ns"])
        self.finished = [_checked(operation) for operation in values["finished"]]
        self.unfinished = [_checked(operation) for operation in values["unfinished"]]
        culprit, doing = int(values["culprit"]), describe(values).strip()
        self.ending = Ending(str(values["status"]), culprit, str(values["reason"]), doing)


class ReportEvents:
    """The events of reports in the row `pid` of a file.

    `tracks` has the numbers of its tracks by name, and `busy` the ends of their last slices.
    """

    def __init__(self, pid: int, tracks: dict[str, int], busy: dict[int, int]) -> None:
        self._pid, self._busy = pid, busy
        self._tracks = {name: track for name, track in tracks.items() if track < _FIRST_PROGRAM_TRACK}

    def head(self, report: FailureReport) -> Iterator[bytes]:
        """Yields the events that a timeline of the rank begins with."""
        yield self._describe("process_name", _DECISIONS, {"name": report.title})
        yield self._describe("process_sort_index", _DECISIONS, {"sort_index": report.rank})
        yield self._describe("thread_name", _DECISIONS, {"name": "Decisions"})
        yield self._describe("world", _DECISIONS, {"size": report.size})
        clock = {"wall_minus_monotonic_ns": report.wall_minus_monotonic}
        yield self._describe("clock", _DECISIONS, clock)

    def body(self, report: FailureReport, operations: Sequence[Reported]) -> Iterator[bytes]:
        """Yields these operations of a report, and the failure, or that there was none."""
        for operation in operations:
            yield from self._operation(operation, report.moment)
        what = {"s": "p", "cat": ENDING, "args": report.ending._asdict()}
        happened = "the world failed" if report.ending.is_failure else "the recorder was written"
        yield self._event("i", happened, _DECISIONS, (report.moment, None), **what)

    def _operation(self, reported: Reported, moment: int) -> Iterator[bytes]:
        """Yields an operation with its phases, as the core writes them; unfinished phases end at `moment`."""
        name = reported["name"]
        if name not in self._tracks:
            self._tracks[name] = max(self._tracks.values(), default=_DECISIONS) + 1
            yield self._describe("thread_name", self._tracks[name], {"name": name})
        track = self._tracks[name]
        submitted, agreed, moved, ended = (int(reported.get(time, 0)) for time in _TIMES)
        begin = max(submitted, self._busy.get(track, 0))  # slices of a track do not overlap
        end = self._busy[track] = max(ended or moment, begin)
        agreed = min(max(agreed or end, begin), end)
        phases = [("NEGOTIATE", (begin, agreed))]
        if moved:
            moved = min(max(moved, agreed), end)
            phases += [("QUEUE", (agreed, moved)), ("TRANSFER", (moved, end))]
        category = {} if ended else {"cat": UNFINISHED}
        facts = {fact: int(reported.get(fact, 0)) for fact in _FACTS} | {"status": reported["state"]}
        more = {name: reported[name] for name in ("error", "stack") if name in reported}
        yield self._event("X", reported["kind"], track, (begin, end), **category, args=facts | more)
        for phase, times in phases:
            if times[0] < times[1]:
                yield self._event("X", phase, track, times, **category)

    def _describe(self, what: str, track: int, args: Mapping[str, Any]) -> bytes:
        return json.dumps({"ph": "M", "name": what, "pid": self._pid, "tid": track, "args": args}).encode()

    def _event(self, phase: str, name: str, track: int, times: tuple[int, int | None], **more: Any) -> bytes:
        """Returns an event, with its times in the form that the core gives them; an instant has no end."""
        begin, end = times
        described = json.dumps({"ph": phase, "name": name, "pid": self._pid, "tid": track, **more})
        duration = "" if end is None else f', "dur": {in_microseconds(end - begin)}'
        return f'{described[:-1]}, "ts": {in_microseconds(begin)}{duration}}}'.encode()


def read_failure_report(path: Path) -> FailureReport:
    """Reads a failure report.

    Raises:
        LaunchError: the file is none.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        text = file.read(MessageKind.REPORT.limit)
    try:
        return FailureReport(json.loads(text))
    except MALFORMED:
        raise LaunchError(f"{path} is no failure report of this version of sirtaki") from None


def _checked(operation: Reported) -> Reported:
    """Returns an operation of a report. Raises an exception of `MALFORMED` if required values are missing."""
    for number in (*_TIMES, *_FACTS):
        _number(operation.get(number, 0))
    _number(operation["submitted_ns"])
    if not all(isinstance(operation[text], str) for text in ("name", "kind", "state")):
        raise TypeError("a text is none")
    return operation


def _number(value: Any) -> int:
    if not 0 <= int(value) < _MAX_REPORTED_NUMBER:
        raise OverflowError("no number of the core")
    return int(value)
