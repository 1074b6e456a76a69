"""Failure reports: the last operations of a rank, and the failure of its world, as events of a timeline.

A rank that has a timeline, too, gets the operations that are missing there: the core writes a timeline a few
times a second, and those in flight never. Times are those of the same monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sirtaki.runner.errors import LaunchError
from sirtaki.runner.frames import LIMITS, MessageKind
from sirtaki.runner.post_mortem import MALFORMED, describe
from sirtaki.runner.rendezvous.wire import printable
from sirtaki.runner.timeline_events import in_microseconds
from sirtaki.runner.trace.trace import Ending

UNFINISHED, ENDING = "unfinished", "failure report"  # categories of events that only reports have
_DECISIONS = 0  # the track of a rank as a whole
_TIMES = ("submitted_ns", "agreed_ns", "moved_ns", "ended_ns")
_FACTS = ("bytes", "process_set", "plan", "fused")
_FIRST_PROGRAM_TRACK = 1_000_000_000  # those of tensors count from 1
_MAX_NUMBER = 1 << 62
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
        """Raises one of `MALFORMED` if these are not the values of a report."""
        self.rank, self.size = int(values["rank"]), int(values["size"])
        self.title = f"rank {self.rank} (pid {int(values['pid'])} on {printable(str(values['host']))})"
        self.moment = _number(values["clock"]["monotonic_ns"])
        self.wall_minus_monotonic = int(values["clock"]["wall_minus_monotonic_ns"])
        self.finished = [_checked(one) for one in values["finished"]]
        self.unfinished = [_checked(one) for one in values["unfinished"]]
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
        """Yields an operation with its phases, as the core writes them; `moment` ends those in flight."""
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
        text = file.read(LIMITS[MessageKind.REPORT])
    try:
        return FailureReport(json.loads(text))
    except MALFORMED:
        raise LaunchError(f"{path} is no failure report of this version of sirtaki") from None


def _checked(operation: Reported) -> Reported:
    """Returns an operation of a report. Raises one of `MALFORMED` if it has not what it needs."""
    for number in (*_TIMES, *_FACTS):
        _number(operation.get(number, 0))
    _number(operation["submitted_ns"])
    if not all(isinstance(operation[text], str) for text in ("name", "kind", "state")):
        raise TypeError("a text is none")
    return operation


def _number(value: Any) -> int:
    if not 0 <= int(value) < _MAX_NUMBER:
        raise OverflowError("no number of the core")
    return int(value)
