"""The table of a parameter server: members of its world serve its parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings.context import Context, using
from sirtaki.common.ops.objects import broadcast_object
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.requests import ALLGATHER, ALLREDUCE_IN_PLACE
from sirtaki.common.tables import leave_table
from sirtaki.common.training.groups import owners_of
from sirtaki.torch.ops.autograd import CollectiveScope, alltoall
from sirtaki.torch.ops.broadcasting import broadcast_all
from sirtaki.torch.training.parameters import filled
from sirtaki.torch.training.stale.rounds import Rounds, WorkerClock

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class TableOptions(NamedTuple):
    """The properties of a table on which all members of its world agree.

    Attributes:
        make_optimizer: returns the optimizer of the parameters that a member serves.
        staleness: number of updates that a pulled table may lack.
        ranks: number of ranks, which push. They are the first members.
    """

    make_optimizer: MakeOptimizer
    staleness: int
    ranks: int


@dataclass
class DtypePart:
    """The parameters of a dtype, in the order of the members that serve them.

    Attributes:
        places: the positions of these parameters.
        lengths: number of elements that each member serves.
    """

    places: list[int]
    lengths: list[int]

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the elements of these parameters, given a tensor for each parameter of the table."""
        return torch.cat([tensors[place].reshape(-1) for place in self.places])

    def split(self, elements: Tensor, into: Sequence[Tensor]) -> None:
        """Copies elements into the tensors of these parameters."""
        targets = [into[place] for place in self.places]
        for target, values in zip(
            targets, elements.split([target.numel() for target in targets]), strict=True
        ):
            target.copy_(values.view(target.shape))


def parts_of(parameters: Sequence[Tensor], owners: Sequence[int], size: int) -> list[DtypePart]:
    """Returns the parameters of each dtype."""
    parts = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        places = [place for place, parameter in enumerate(parameters) if parameter.dtype == dtype]
        places.sort(key=lambda place: owners[place])
        lengths = [sum(parameters[p].numel() for p in places if owners[p] == rank) for rank in range(size)]
        parts.append(DtypePart(places, lengths))
    return parts


class Table(Rounds):
    """One member's side of the table: it may serve parameters, and keeps the last values of all.

    Members that are no ranks serve the table; if there are none, each rank serves a part. For each update,
    the ranks send their gradients to those that serve them. These add them up in the order of the ranks,
    step, and send the new values to all.

    `on_end` is called in the thread with the failure, if there is one, after the last round.
    """

    def __init__(
        self,
        scope: CollectiveScope,
        parameters: Sequence[Tensor],
        options: TableOptions,
        on_end: Callable[[BaseException | None], None] = lambda failure: None,
    ) -> None:
        self._workers, self._ranks, self._on_end = WorkerClock(options.staleness), options.ranks, on_end
        super().__init__(scope, self._workers)
        size = len(scope.ranks)
        self._values = [
            parameter.detach().clone(memory_format=torch.contiguous_format) for parameter in parameters
        ]
        self._gradients: deque[list[Tensor | None]] = deque()
        serving = range(options.ranks, size) or range(size)
        owners = [
            serving[owner] for owner in owners_of([value.nbytes for value in self._values], len(serving))
        ]
        self._parts = parts_of(self._values, owners, size)
        own = [place for place, owner in enumerate(owners) if owner == self._place]
        self._served = {place: self._values[place].clone() for place in own}
        self.optimizer = options.make_optimizer(list(self._served.values())) if own else None
        if not self._pushes:
            self.end()
        self.start()

    def push(self, gradients: Sequence[Tensor | None]) -> None:
        """Copies the next gradients of this rank into the table."""
        copies = [
            None if gradient is None else gradient.detach().clone(memory_format=torch.contiguous_format)
            for gradient in gradients
        ]
        with self._changed:
            self._gradients.append(copies)
            self._contribute()

    @torch.no_grad()
    def pull(self, into: Sequence[Tensor], has_ended: bool) -> int:
        """Copies the values into these tensors, once they are new enough; returns the number of updates.

        If this rank has ended, they are new enough when all ranks have.
        """
        with self._changed:
            while not self._is_new_enough(has_ended):
                self._wait_for_change(has_ended, self._workers.updates)
            for value, target in zip(self._values, into, strict=True):
                target.copy_(value)
            self._applied = self._workers.updates
            self._compute_on()
            return self._applied

    @property
    def pushes(self) -> int:
        """Returns the number of gradients that this rank has pushed."""
        return self._contributed

    @property
    def _pushes(self) -> bool:
        return self._place < self._ranks

    def _leave(self) -> None:
        self._on_end(self._failure)

    def _wait_for_change(self, has_ended: bool, known: int) -> None:
        """Waits for an update beyond the `known` updates: the deadline applies to each update separately."""
        self._wait(lambda: self._is_new_enough(has_ended) or self._workers.updates > known)

    def _is_new_enough(self, has_ended: bool) -> bool:
        if has_ended:
            return not self._is_running and self._failure is None
        return self._contributed - self._workers.updates <= self._workers.staleness

    def _compare_options(self, reports: Any) -> None:
        """Compares nothing: no other rank's optimizer updates the same parameters."""

    @torch.no_grad()
    def _update(self) -> None:
        with self._changed:
            own = self._gradients.popleft() if self._gradients else [None] * len(self._values)
        is_present = torch.tensor([tensor is not None for tensor in own], dtype=torch.int64)
        (present,) = self._scope.derived("present").run_group(ALLREDUCE_IN_PLACE, [is_present])
        full = filled(own, self._values)
        for number, part in enumerate(self._parts):
            self._collect(part, full, present.tolist(), f"gradients.{number}")
        if self.optimizer is not None:
            self.optimizer.step()
        values = [torch.empty_like(value) for value in self._values]
        for number, part in enumerate(self._parts):
            own_places = [place for place in part.places if place in self._served]
            mine = [self._served[place].reshape(-1) for place in own_places]
            empty = self._values[part.places[0]].new_empty(0)
            own_elements = torch.cat([empty, *mine])
            (elements,) = self._scope.derived(f"values.{number}").run_group(ALLGATHER, [own_elements])
            part.split(elements, values)
        with self._changed:
            self._values = values
            self._workers.updates += 1
            self._has_news |= self._has_ended
            self._changed.notify_all()

    def _collect(self, part: DtypePart, gradients: list[Tensor], present: list[int], name: str) -> None:
        """Sends a dtype's gradients to their servers, and sets the means of parameters that are served here.

        A server sends no elements: adding zeros would change the sign of a negative zero.
        """
        sent, splits = part.joined(gradients), part.lengths
        if not self._pushes:
            sent, splits = sent[:0], [0] * len(splits)
        rows, _ = alltoall(self._scope.derived(name), splits, sent)
        length = part.lengths[self._place]
        total, *others = rows.split(length) if length else [rows]
        for other in others:
            total = total + other
        means = total / self._ranks
        for place in part.places:
            if place in self._served:
                served = self._served[place]
                mean, means = means[: served.numel()], means[served.numel() :]
                served.grad = mean.view(served.shape) if present[place] else None


# ---- A table that ranks share with servers -------------------------------------------------------------


def shared_table(world: Context, parameters: Sequence[Tensor], options: TableOptions) -> Table:
    """Returns a rank's side of a table that the servers in this world serve. All ranks must call it.

    The servers use the optimizer's function of rank 0, which is pickled.

    Raises:
        Exception: the error that pickling raised, on rank 0.
        HorovodInternalError: rank 0 could not pickle its function, or a member was lost.
    """
    with using(world):
        broadcast_object((options, [(parameter.shape, parameter.dtype) for parameter in parameters]))
    _broadcast(world, [parameter.detach().contiguous() for parameter in parameters])
    return Table(_scope(world), parameters, options, partial(leave_table, world))


def serve(world: Context, on_end: Callable[[BaseException | None], None]) -> None:
    """Begins a server's side of a table."""
    with using(world):
        options, kinds = broadcast_object()
    values = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    _broadcast(world, values)
    Table(_scope(world), values, options, on_end)


def _broadcast(world: Context, values: Sequence[Tensor]) -> None:
    named = [(f"table.{place}", value) for place, value in enumerate(values)]
    broadcast_all(world, named, 0, global_process_set)


def _scope(world: Context) -> CollectiveScope:
    return CollectiveScope(world, "table", global_process_set)
