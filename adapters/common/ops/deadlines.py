"""All-reduces that do not wait for ranks that are late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.handles import Operation, pooled_batch
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.reduction import Call, describe
from sirtaki.common.ops.requests import CollectiveOptions
from sirtaki.common.ops.tensor import ArrayAdapter


@dataclass(frozen=True)
class Deadline:
    """When an all-reduce is decided without the ranks that are missing.

    Attributes:
        seconds: time from the first rank's request.
        quorum: the share of the ranks that must be there, in any case.
    """

    seconds: float
    quorum: float

    def __post_init__(self) -> None:
        seconds_are_valid = _is_number(self.seconds) and 0 <= self.seconds < math.inf
        if not seconds_are_valid:
            raise ValueError(f"deadline is {self.seconds!r}, but it has to be a number of seconds, 0 or more")
        if not (_is_number(self.quorum) and 0 < self.quorum <= 1):
            raise ValueError(
                f"quorum is {self.quorum!r}, but it has to be a share of the ranks: above 0, at most 1"
            )

    def ranks(self, size: int) -> int:
        """Returns the quorum in a world of this size, as a number of ranks."""
        from fractions import Fraction  # imported late: it takes a millisecond

        return math.ceil(Fraction(str(self.quorum)) * size)


class Decided(NamedTuple):
    """The result of an all-reduce with a deadline, the same on all ranks.

    Attributes:
        tensor: the combination.
        contributors: the ranks whose data is in it, ascending.
    """

    tensor: Any
    contributors: Sequence[int]


def with_deadline(
    adapter: ArrayAdapter, context: Context, tensor: Any, options: CollectiveOptions, deadline: Deadline
) -> Operation[Decided]:
    """Prepares an all-reduce with a deadline; its result is a new array.

    Each rank's n-th call with a name belongs to round n. A rank that calls it after its round was decided
    receives that round's result.

    Raises:
        ValueError: the options have a process set.
    """
    if options.process_set is not global_process_set:
        raise ValueError("a deadline is for all ranks: leave out process_set")
    batch = pooled_batch()
    source = adapter.reducible_view(tensor, options.name)
    result, target = adapter.empty_like(source.owner)
    describe(batch, core.ALLREDUCE, source, target, Call(options.name), how=options.reduction)
    batch.set_deadline(0, deadline.seconds, deadline.ranks(context.size))

    def finish(context: Context, batch: Batch) -> Decided:
        return Decided(adapter.wrapped(result), context.contributors(batch))

    return Operation(batch, (source, result), finish, adapter.streams)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
