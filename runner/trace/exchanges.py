"""Joins the operations of all ranks: operations of the same plan and name are parts of an exchange."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.trace.operations import RecordedOperation
from sirtaki.runner.trace.trace import ProcessRow

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
