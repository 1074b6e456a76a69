"""A trace: the rows of all files, each of a rank, and what the files lack."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.trace.doings import Slices
from sirtaki.runner.trace.formats import ranks_text
from sirtaki.runner.trace.sources import Source

_LAST = 4096  # operations: a failure report has the last 256, and files nearly keep their order


class RecordedOperation(NamedTuple):
    """A tensor's part in a plan, on a rank. Times are in nanoseconds of the host's monotonic clock.

    Attributes:
        plan: the number of the plan, the same on all ranks.
        name, kind: numbers of texts in the trace.
        process_set: its number.
        fused: the number of tensors in the plan.
        bytes: the size of this rank's tensor.
        track: that of its slices in the file.
        submitted: the rank's call.
        decided: the rank has learnt that all ranks agree.
        started: the rank has begun to move data; 0 if nothing moved.
        ended: the rank has the result.
    """

    plan: int
    name: int
    kind: int
    process_set: int
    fused: int
    bytes: int
    track: int
    submitted: int
    decided: int
    started: int
    ended: int

    def moved_by(self, offset: int) -> RecordedOperation:
        """Returns the operation with all its times later by `offset` nanoseconds."""
        if not offset:
            return self
        return self._replace(
            submitted=self.submitted + offset,
            decided=self.decided + offset,
            started=self.started and self.started + offset,
            ended=self.ended + offset,
        )


class Operations:
    """Operations, 88 bytes each."""

    def __init__(self) -> None:
        self._columns = [array("q") for _ in RecordedOperation._fields]
        of_field = dict(zip(RecordedOperation._fields, self._columns, strict=True))
        self._plans, self._names = of_field["plan"], of_field["name"]
        self._tracks, self._ended = of_field["track"], of_field["ended"]
        self.process_sets: set[int] = set()
        self.first_plan = self.last_plan = 0  # 0: there are none

    def __len__(self) -> int:
        return len(self._plans)

    def append(self, operation: RecordedOperation) -> None:
        """Adds an operation. Raises OverflowError for numbers that the core does not write."""
        for column, value in zip(self._columns, operation, strict=True):
            column.append(value)
        self.process_sets.add(operation.process_set)
        self.first_plan = min(self.first_plan or operation.plan, operation.plan)
        self.last_plan = max(self.last_plan, operation.plan)

    def has_around(self, plan: int) -> bool:
        """Returns whether there are operations of earlier and of later plans."""
        return self.first_plan < plan < self.last_plan

    def end_of(self, plan: int, name: int) -> int | None:
        """Returns the end of an operation among the last plans; None if it is not among them."""
        for index in range(len(self._plans) - 1, max(len(self._plans) - _LAST, 0) - 1, -1):
            if (self._plans[index], self._names[index]) == (plan, name):
                return self._ended[index]
        return None

    def ends_of_tracks(self) -> Iterator[tuple[int, int]]:
        """Yields the track and the end of each operation."""
        return zip(self._tracks, self._ended, strict=True)

    def in_order(self) -> Iterator[RecordedOperation]:
        """Yields the operations by plan, then by name."""
        plans, names = self._plans, self._names
        order = array("q", sorted(range(len(plans)), key=lambda index: (plans[index], names[index])))
        for index in order:
            yield RecordedOperation(*(column[index] for column in self._columns))


# ---- The rows of a trace -------------------------------------------------------------------------------


class Failed(NamedTuple):
    """An operation that ended with an error, of which the rank learnt at its end.

    Attributes:
        status: such as "mismatch".
        error: the text of the error, if it is a mismatch, with the values of the ranks; else "".
        place: the line of the program at which the rank learnt of it; "" if it is not known.
    """

    operation: RecordedOperation
    status: str
    error: str
    place: str


class Ending(NamedTuple):
    """A rank's failure report: why its world failed, by which rank's fault, and what the rank was doing.

    The recorder of a rank whose world runs has the status "ok".
    """

    status: str
    culprit: int
    reason: str
    doing: str

    @property
    def is_failure(self) -> bool:
        return self.status != "ok"


class StatedClock(NamedTuple):
    """The clock that a file states for a row, in nanoseconds.

    Attributes:
        wall_minus_monotonic: the difference of the host's clocks; None if it is not stated.
        is_merged: whether `sirtaki trace merge` has written the row.
        offset, error: how far it has moved the row's times, and by how much that may be wrong; None if
            that is not known.
    """

    wall_minus_monotonic: int | None = None
    is_merged: bool = False
    offset: int = 0
    error: int | None = None


@dataclass
class ProcessRow:
    """A row of a file: a rank (in an elastic job, of a generation), or the changes of a worker.

    Attributes:
        pid: its process id in the file.
        rank: None for the changes of a worker.
        generation: that of an elastic job; 0 in other jobs.
        world_size: the number of ranks; 0 if the file does not say it.
        program: what the program did, by the track and the name of its slices.
        output_pid: its process id in a merged trace; the rank, unless the job is elastic.
        ending: its failure report; None if there is none.
        added: the events that come from its failure report, as its file would have them.
    """

    source: Source
    pid: int
    title: str
    host: str = ""
    rank: int | None = None
    generation: int = 0
    world_size: int = 0
    clock: StatedClock = field(default_factory=StatedClock)
    operations: Operations = field(default_factory=Operations)
    failed: list[Failed] = field(default_factory=list)
    program: dict[tuple[int, str], Slices] = field(default_factory=dict)
    output_pid: int = 0
    ending: Ending | None = None
    added: list[bytes] = field(default_factory=list)

    def ends_of_tracks(self) -> dict[int, int]:
        """Returns the end of the last operation of each track."""
        ends = dict[int, int]()
        failed = ((failed.operation.track, failed.operation.ended) for failed in self.failed)
        for track, end in (*self.operations.ends_of_tracks(), *failed):
            ends[track] = max(end, ends.get(track, 0))
        return ends


@dataclass
class Trace:
    """All rows, in the order of the output; numbered texts; sentences about what the files lack."""

    rows: list[ProcessRow]
    texts: list[str]
    lacks: list[str]

    def generations(self) -> Iterator[list[ProcessRow]]:
        """Yields the rows of ranks of each generation, in the order of ranks."""
        ranks = defaultdict(list)
        for row in self.rows:
            if row.rank is not None:
                ranks[row.generation].append(row)
        for _, rows in sorted(ranks.items()):
            yield sorted(rows, key=lambda row: row.rank or 0)


# ---- The operations of all ranks: those of the same plan and name are parts of an exchange -------------


_WORLD = 0  # the process set of all ranks
_Part = tuple[int, int, int, RecordedOperation]  # plan, name, position of the row, operation


class Exchange(NamedTuple):
    """One tensor's exchange. `parts` are the operations of the ranks, by the position of their rows."""

    plan: int
    name: int
    process_set: int
    parts: Mapping[int, RecordedOperation]
    is_complete: bool  # the files have the parts of all ranks that can have taken part

    @property
    def last(self) -> int:
        """The position of the row that submitted it last; of several the first."""
        return max(self.parts, key=lambda row: (self.parts[row].submitted, -row))


def exchanges(rows: Sequence[ProcessRow], offsets: Sequence[int] | None = None) -> Iterator[Exchange]:
    """Yields the exchanges of a generation, by plan and name; `offsets` are added to the rows' times.

    Raises LaunchError where the rows are not of one job.
    """
    members = defaultdict(set, {_WORLD: {*range(len(rows))}})
    for position, row in enumerate(rows):
        for process_set in row.operations.process_sets:
            members[process_set].add(position)
    streams = [
        _parts(row, position, offsets[position] if offsets else 0) for position, row in enumerate(rows)
    ]
    for plan, parts in groupby(heapq.merge(*streams), key=lambda part: part[0]):
        of_plan = list(parts)
        _check_plan(rows, plan, of_plan)
        for name, of_name in groupby(of_plan, key=lambda part: part[1]):
            found = {position: operation for _, _, position, operation in of_name}
            process_set = next(iter(found.values())).process_set
            lacking = members[process_set] - found.keys()
            # A rank whose file has earlier and later plans did not take part in this one: it had joined.
            is_complete = all(rows[row].operations.has_around(plan) for row in lacking)
            yield Exchange(plan, name, process_set, found, is_complete)


def _parts(row: ProcessRow, position: int, offset: int) -> Iterator[_Part]:
    for operation in row.operations.in_order():
        yield operation.plan, operation.name, position, operation.moved_by(offset)


def _check_plan(rows: Sequence[ProcessRow], plan: int, parts: Sequence[_Part]) -> None:
    """Raises LaunchError if a plan differs between ranks: plan numbers are the same on all ranks."""
    first = parts[0]
    names = defaultdict(set)
    for _, name, position, operation in parts:
        names[position].add(name)
        if _properties(operation) != _properties(first[3]):
            _refuse(rows[first[2]], rows[position], plan)
    for position, known in names.items():
        if known.isdisjoint(names[first[2]]):
            _refuse(rows[first[2]], rows[position], plan)


def _properties(operation: RecordedOperation) -> tuple[int, int, int]:
    return operation.kind, operation.process_set, operation.fused


def _refuse(row: ProcessRow, other: ProcessRow, plan: int) -> None:
    raise LaunchError(
        f"{row.source.path} (rank {row.rank}) and {other.source.path} (rank {other.rank}) are not of one "
        f"job: plan {plan} has other tensors"
    )


# ---- Operations that ended with an error, joined over the ranks ----------------------------------------


MISMATCH = "mismatch"


@dataclass
class Disagreement:
    """The n-th failed operation of a name. A refused operation has no plan, so its name and order join it.

    Attributes:
        submitted: the kind of the call and the bytes of the tensor, by rank.
        parts: the operation of each rank, with its row.
    """

    name: str
    generation: int
    submitted: dict[int, tuple[str, int]] = field(default_factory=dict)
    parts: list[tuple[ProcessRow, Failed]] = field(default_factory=list)

    @property
    def statuses(self) -> set[str]:
        return {failed.status for _, failed in self.parts}

    @property
    def is_mismatch(self) -> bool:
        return MISMATCH in self.statuses

    @property
    def error(self) -> str:
        """The text of the error; "" if no file has it."""
        return next((failed.error for _, failed in self.parts if failed.error), "")

    @property
    def places(self) -> dict[int, str]:
        """Returns by rank the program line that received the error, where the reports have it."""
        return {row.rank or 0: failed.place for row, failed in self.parts if failed.place}

    @property
    def submitted_text(self) -> str:
        """Formats "rank 0 all-reduce of 24 bytes, rank 1 all-reduce of 32 bytes"."""
        return ", ".join(
            f"rank {rank} {kind} of {size} bytes" for rank, (kind, size) in sorted(self.submitted.items())
        )

    @property
    def places_text(self) -> str:
        """Formats "ranks 0-2 at train.py:7, rank 3 in step() at train.py:9"."""
        by_place = defaultdict(list)
        for rank, place in sorted(self.places.items()):
            by_place[place].append(rank)
        return ", ".join(f"{ranks_text(ranks)} {place}" for place, ranks in by_place.items())


def failures(trace: Trace) -> Iterator[Disagreement]:
    """Yields the failed operations of all generations."""
    for rows in trace.generations():
        found: dict[tuple[int, int], Disagreement] = {}
        for row in rows:
            seen: Counter[int] = Counter()
            for failed in row.failed:
                operation = failed.operation
                key = (operation.name, seen[operation.name])
                seen[operation.name] += 1
                name, kind = trace.texts[operation.name], trace.texts[operation.kind]
                disagreement = found.setdefault(key, Disagreement(name, row.generation))
                disagreement.submitted[row.rank or 0] = (kind, operation.bytes)
                disagreement.parts.append((row, failed))
        yield from found.values()
