"""Writes a trace of all ranks for Perfetto, in the JSON array form of the Trace Event Format.

(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU) Events are those of the
files, moved to one clock. An arrow, a flow of that format, leads from each rank's call to that of the last
rank.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

from sirtaki.runner.observe.timeline import in_row, merging_file, shifted
from sirtaki.runner.observe.timeline_events import EventFile, in_microseconds, write_events
from sirtaki.runner.trace.clocks import HostClock
from sirtaki.runner.trace.sources import Meter, Show, Source, show_nothing
from sirtaki.runner.trace.trace import MISMATCH, ProcessRow, RecordedOperation, Trace, exchanges, failures

_ARROW = "last arrival"


def write_trace(trace: Trace, clocks: Sequence[HostClock], path: Path, show: Show = show_nothing) -> int:
    """Writes all events into `path`, compressed if that ends in .gz, and returns the number of arrows.
    `show` receives how much has been written.

    Raises OSError.
    """
    clock_of = {id(row): clock for clock in clocks for row in clock.rows}
    growing = merging_file(path)
    events = itertools.chain(_events(trace, clock_of, show), _mismatches(trace, clock_of))
    try:
        arrows = _write(growing, path.suffix == ".gz", events, _arrows(trace, clock_of))
        os.replace(growing, path)
    finally:
        growing.unlink(missing_ok=True)
    return arrows


def _write(path: Path, is_compressed: bool, events: Iterable[bytes], arrows: Iterable[bytes]) -> int:
    """Writes a file; returns the number of arrows."""
    count = itertools.count()  # of the arrows that have been written
    counted = (arrow for arrow, _ in zip(arrows, count, strict=False))
    with ExitStack() as stack:
        out: IO[bytes] | gzip.GzipFile = stack.enter_context(open(path, "wb"))
        if is_compressed:  # without a name and a time, so that equal traces have equal bytes
            out = stack.enter_context(gzip.GzipFile("", "wb", 6, out, mtime=0))
        write_events(cast(IO[bytes], out), itertools.chain(events, counted))
    return next(count)


def _events(trace: Trace, clock_of: Mapping[int, HostClock], show: Show) -> Iterator[bytes]:
    by_source: dict[Source, dict[int, ProcessRow]] = {}
    for row in trace.rows:
        by_source.setdefault(row.source, {})[row.pid] = row
    meter = Meter("writing", [source.path for source in by_source], show)
    for source, rows in by_source.items():
        lines = iter(()) if source.is_report else meter.lines(EventFile(source.path))
        for line in itertools.chain(lines, *(row.added for row in rows.values())):
            try:
                event = json.loads(line)
                row = rows[event["pid"]]
                if _is_whole(event):
                    yield _placed(line, event, row, clock_of[id(row)])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a damaged line
                continue


def _mismatches(trace: Trace, clock_of: Mapping[int, HostClock]) -> Iterator[bytes]:
    """Yields an instant on each rank's track of a refused operation, where the rank learnt of it."""
    for failure in failures(trace):
        if failure.is_mismatch:
            described = {
                "operation": failure.name,
                "error": failure.error,
                "submitted": failure.submitted_text,
            }
            for row, failed in failure.parts:
                args = {**described, "place": failed.place}
                moment = in_microseconds(failed.operation.ended + clock_of[id(row)].offset)
                place = f'"pid": {row.output_pid}, "tid": {failed.operation.track}, "ts": {moment}'
                yield (
                    f'{{"ph": "i", "name": "{MISMATCH}", "cat": "{MISMATCH}", "s": "t", {place}, '
                    f'"args": {json.dumps(args)}}}'
                ).encode()


def _is_whole(event: dict[str, Any]) -> bool:
    """Returns whether an event has what Perfetto needs. What an earlier merge has added is made anew."""
    times = [event[name] for name in {"X": ("ts", "dur"), "i": ("ts",), "M": ()}.get(event["ph"], ("ts",))]
    is_placed = all(isinstance(event[name], int) for name in ("pid", "tid"))
    is_timed = all(isinstance(time, int | float) and time >= 0 for time in times)
    return (
        is_placed
        and is_timed
        and isinstance(event["name"], str)
        and event.get("cat") not in (_ARROW, MISMATCH)
    )


def _placed(line: bytes, event: dict[str, Any], row: ProcessRow, clock: HostClock) -> bytes:
    """Returns an event in its row and on the common clock."""
    if event["name"] == "clock":
        event["args"] |= {"offset_ns": clock.moved + clock.offset, "error_ns": clock.error}
        line = json.dumps(event).encode()
    if row.source.part is not None:
        line = in_row(line, row.output_pid, row.source.part)
    return shifted(line, clock.offset) if clock.offset else line


def _arrows(trace: Trace, clock_of: Mapping[int, HostClock]) -> Iterator[bytes]:
    """Yields each arrow: the two events at its ends."""
    number = itertools.count(1)
    for rows in trace.generations():
        for exchange in exchanges(rows, [clock_of[id(row)].offset for row in rows]):
            if not exchange.is_complete:
                continue
            last = exchange.last
            for position, operation in exchange.parts.items():
                if position != last:
                    identity = next(number)
                    begin = _end("s", identity, rows[position], operation)
                    end = _end("f", identity, rows[last], exchange.parts[last])
                    yield begin + b",\n" + end


def _end(phase: str, number: int, row: ProcessRow, operation: RecordedOperation) -> bytes:
    binding = ', "bp": "e"' if phase == "f" else ""  # to the slice around it, not to the next one
    return (
        f'{{"ph": "{phase}", "name": "{_ARROW}", "cat": "{_ARROW}", "id": {number}, "pid": {row.output_pid}, '
        f'"tid": {operation.track}, "ts": {in_microseconds(operation.submitted)}{binding}}}'
    ).encode()
