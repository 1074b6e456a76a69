"""Joins the operations of all ranks: operations of the same plan and name are parts of an exchange."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.trace.formats import ranks_text
from sirtaki.runner.trace.trace import Failed, ProcessRow, RecordedOperation, Trace

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
                key = (failed.name, seen[failed.name])
                seen[failed.name] += 1
                disagreement = found.setdefault(key, Disagreement(trace.texts[failed.name], row.generation))
                disagreement.submitted[row.rank or 0] = (trace.texts[failed.kind], failed.bytes)
                disagreement.parts.append((row, failed))
        yield from found.values()
