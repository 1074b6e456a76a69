"""The operations of a rank, in columns: a trace may have millions of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

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
