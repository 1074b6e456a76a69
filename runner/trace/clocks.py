"""The offsets between the clocks of hosts, from the order that exchanges give to events on two hosts.

No rank has a result before the last of them has submitted, and none that of an all-reduce before all have
begun to move data. Each such pair of events on two hosts bounds the offset of their clocks on one side, as
the two halves of a round trip do in the Network Time Protocol (RFC 5905,
https://www.rfc-editor.org/rfc/rfc5905#section-8). Over a trace, the closest bounds remain.

The bounds hold because the core reads the clock before a submission and a beginning, and after an end. The
time of a decision is that of an earlier moment of the same iteration, so it bounds nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.observe.timeline import ONE_HOST_NS
from sirtaki.runner.trace.trace import ProcessRow, RecordedOperation, Trace, exchanges

_MAX_DRIFT_NS = 1_000_000_000  # clocks of one job that contradict each other by more are those of two jobs
_ALL_REDUCE = "all-reduce"


@dataclass
class HostClock:
    """A clock that some rows share. Times are in nanoseconds.

    Attributes:
        rows: those of one host, or of several hosts that run on one machine.
        offset: what has to be added to their times in the files.
        moved: what `sirtaki trace merge` has added to them, if it wrote the files.
        error: the largest error of the offset; None if nothing bounds it.
        exchanges: the number of exchanges that the bounds come from.
    """

    rows: list[ProcessRow]
    offset: int = 0
    moved: int = 0
    error: int | None = None
    exchanges: int = 0

    @property
    def hosts(self) -> list[str]:
        return sorted({row.host for row in self.rows if row.host})

    @property
    def ranks(self) -> list[int]:
        return sorted({row.rank for row in self.rows if row.rank is not None})


@dataclass
class _Bounds:
    """Bounds of the offset that has to be added to the times of a clock, where they are known."""

    lower: int | None = None
    upper: int | None = None
    count: int = 0

    def narrow(
        self, first: Sequence[RecordedOperation], other: Sequence[RecordedOperation], is_reduced: bool
    ) -> None:
        """Narrows the bounds by an exchange that moved data: its events on the first and on this clock."""
        if not all(operation.started for operation in (*first, *other)):
            return
        begin = "started" if is_reduced else "submitted"
        lower = _last(first, begin) - _first(other, "ended")
        upper = _first(first, "ended") - _last(other, begin)
        self.lower = lower if self.lower is None else max(self.lower, lower)
        self.upper = upper if self.upper is None else min(self.upper, upper)
        self.count += 1


def align_clocks(trace: Trace) -> list[HostClock]:
    """Returns the clocks of a trace; the first clock belongs to the first rank, with offset 0.

    Raises LaunchError if the rows are not of one job, or some have been merged without the others.
    """
    _refuse_mixtures(trace)
    clocks = _by_host(trace)
    bounds = _bounds(trace, clocks)
    first = clocks[0]
    for clock, found in zip(clocks, bounds, strict=True):
        stated = clock.rows[0].clock
        if stated.is_merged:
            clock.moved, clock.error = stated.offset, stated.error
        elif clock is first:
            clock.error = 0
        elif found.lower is None or found.upper is None:
            clock.offset = _by_wall_clocks(first.rows[0], clock.rows[0])
        else:
            _refuse(found.lower - found.upper)
            clock.offset = (found.lower + found.upper) // 2
            clock.error = (abs(found.upper - found.lower) + 1) // 2
        clock.exchanges = found.count
    return clocks


def _refuse_mixtures(trace: Trace) -> None:
    """Raises LaunchError if only some rows have been moved to a common clock."""
    merged = [row for row in trace.rows if row.clock.is_merged]
    if merged and len(merged) < len(trace.rows):
        raise LaunchError(
            f"{merged[0].source.path} has been merged without the other files: name the files that it was "
            "made of instead"
        )


def _by_host(trace: Trace) -> list[HostClock]:
    """Returns the clocks; rows with the same difference of wall and monotonic clock share a clock."""
    clocks: list[HostClock] = []
    for row in sorted(trace.rows, key=lambda row: (row.rank is None, row.output_pid)):
        own = row.clock.wall_minus_monotonic
        for clock in clocks:
            other = clock.rows[0].clock.wall_minus_monotonic
            if own is None or other is None or abs(own - other) < ONE_HOST_NS:
                clock.rows.append(row)
                break
        else:
            clocks.append(HostClock([row]))
    return clocks


def _bounds(trace: Trace, clocks: Sequence[HostClock]) -> list[_Bounds]:
    """Returns the bounds of each clock's offset to the first clock. Raises as `align_clocks`."""
    bounds = [_Bounds() for _ in clocks]
    number_of = {id(row): number for number, clock in enumerate(clocks) for row in clock.rows}
    for rows in trace.generations():
        for exchange in exchanges(rows):
            on_clock = defaultdict(list)
            for position, operation in exchange.parts.items():
                on_clock[number_of[id(rows[position])]].append(operation)
            is_reduced = trace.texts[next(iter(exchange.parts.values())).kind] == _ALL_REDUCE
            for number, operations in on_clock.items():
                _refuse(_last(operations, "submitted") - _first(operations, "ended"))
                if number and 0 in on_clock:
                    bounds[number].narrow(on_clock[0], operations, is_reduced)
    return bounds


def _refuse(gap: int) -> None:
    """Raises LaunchError if an exchange ended more than _MAX_DRIFT_NS before another rank submitted."""
    if gap > _MAX_DRIFT_NS:
        raise LaunchError(
            "these files are not of one job: in one of them, exchanges had ended "
            f"{gap / 1e9:.0f} s before another rank began them"
        )


def _by_wall_clocks(first: ProcessRow, row: ProcessRow) -> int:
    """Returns the offset by the wall clocks. Within a file, hvdrun has moved the times by it already."""
    own, other = row.clock.wall_minus_monotonic, first.clock.wall_minus_monotonic
    if own is None or other is None or row.source == first.source:
        return 0
    return own - other


def _first(operations: Sequence[RecordedOperation], event: str) -> int:
    return min(getattr(operation, event) for operation in operations)


def _last(operations: Sequence[RecordedOperation], event: str) -> int:
    return max(getattr(operation, event) for operation in operations)
