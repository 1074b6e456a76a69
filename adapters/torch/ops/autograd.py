"""Differentiable collectives.

The convention: the differentiated quantity is the sum of the losses of all ranks. So the derivative of a sum
is the sum of the ranks' incoming gradients, that of an average their average, and the gradient of a rank's
slice of a gathered tensor is the sum of its incoming gradients. (Horovod averages instead of adding for
broadcast and all-gather; `sirtaki.common.semantics` selects that.) All ranks have to run the backward pass,
as they ran the forward one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import Function

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context, current, find
from sirtaki.bindings.errors import NotInitializedError, UnsupportedError
from sirtaki.common import semantics
from sirtaki.common.ops import requests
from sirtaki.common.ops.collectives import ArrayCollectives
from sirtaki.common.ops.handles import Handle, run, start
from sirtaki.common.ops.process_sets import ProcessSet
from sirtaki.common.ops.requests import COUNTED_ALLTOALL, OP_NAMES, CollectiveOptions, Reduction
from sirtaki.common.training.shares import refuse_derivative
from sirtaki.torch.ops import tensors as adapter

_SUM = Reduction(core.SUM)

# The backward passes of all-reduced scalars: sirtaki.torch.plain_optimizers looks for averaged losses.
averaged_losses: WeakKeyDictionary[Context, int] = WeakKeyDictionary()

_WRAP_AGAIN = "make it part of the new one: hvd.DistributedOptimizer(optimizer, model.named_parameters())"


@dataclass(frozen=True)
class CollectiveScope:
    """The ranks among which a collective runs, and its name."""

    context: Context
    name: str | None
    process_set: ProcessSet

    @classmethod
    def numbered(cls, context: Context, name: str, process_set: ProcessSet) -> CollectiveScope:
        """Returns a scope with a unique name: two optimizers may have parameters of the same names.

        All ranks must create their scopes of a name in the same order.
        """
        number = context.next_number(f"{name}.{process_set.number(context)}")
        return cls(context, f"{name}.{number}" if number else name, process_set)

    def derived(self, part: str = "gradient") -> CollectiveScope:
        """Returns the scope of a collective of the backward pass."""
        return self if self.name is None else replace(self, name=f"{self.name}.{part}")

    def options(self, how: Reduction = _SUM, root: int = 0) -> CollectiveOptions:
        """Returns the options of a collective in this scope."""
        return CollectiveOptions(self.name, self.process_set, how, root)

    def run(self, collective: requests.Collective, tensor: Tensor, how: Reduction = _SUM) -> Any:
        """Runs a collective of a tensor, and returns its result, unrecorded."""
        return run(self.context, COLLECTIVES.single(self.context, collective, tensor, self.options(how)))

    def run_group(
        self, collective: requests.Collective, tensors: Sequence[Tensor], how: Reduction = _SUM
    ) -> list[Tensor]:
        """Works like `run`, for several tensors."""
        return run(self.context, COLLECTIVES.group(self.context, collective, tensors, self.options(how)))

    def start_group(
        self, collective: requests.Collective, tensors: Sequence[Tensor], how: Reduction = _SUM
    ) -> Handle[list[Tensor]]:
        """Works like `run_group`, without waiting."""
        return start(self.context, COLLECTIVES.group(self.context, collective, tensors, self.options(how)))

    @property
    def has_ended(self) -> bool:
        """Returns whether this world has been shut down."""
        return self.context.is_shut_down

    @property
    def is_alive(self) -> bool:
        """Returns whether this world can still exchange data."""
        return not self.has_ended and self.context.failure is None

    def check_world(self, remedy: str = _WRAP_AGAIN) -> None:
        """Raises NotInitializedError if this world has ended, unless it had 1 rank and no world follows."""
        if self.has_ended and (self.context.size > 1 or find() not in (None, self.context)):
            raise NotInitializedError(
                f"this optimizer belongs to a world that hvd.shutdown() has ended; after hvd.init() {remedy}"
            )

    @property
    def ranks(self) -> list[int]:
        return self.process_set.members(self.context)

    @property
    def has_no_peers(self) -> bool:
        """Returns whether this rank has no peers in the set: it is the only member, or no member."""
        return len(self.ranks) == 1 or self.context.rank not in self.ranks


@dataclass(frozen=True)
class Collective:
    """A collective of a tensor, or of a group of tensors, and its derivative."""

    collective: ClassVar[requests.Collective]
    scope: CollectiveScope
    is_grouped: bool = False

    def options(self) -> CollectiveOptions:
        """Returns the options of the exchange."""
        return self.scope.options()

    @property
    def is_linear(self) -> bool:
        """Returns whether the derivative does not depend on the inputs' values."""
        return True

    def derivative(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the inputs' gradients from the outputs'. The inputs of a linear collective have no data."""
        raise NotImplementedError

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results, unrecorded."""
        context, options = self.scope.context, self.options()
        if self.is_grouped:
            return run(context, COLLECTIVES.group(context, self.collective, tensors, options))
        return [run(context, COLLECTIVES.single(context, self.collective, tensors[0], options))]

    def apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results, recorded if autograd tracks any of the tensors."""
        if not any(map(_is_recorded, tensors)):
            return self.run(tensors)
        refuse_derivative()
        if self.is_linear:
            return list(_Recorded.apply(self, None, *tensors))
        # One node for each tensor: the backward pass of one result frees nothing that another needs.
        results = self.run([tensor.detach() for tensor in tensors])
        return [
            _Recorded.apply(self._of_one(index), [result], tensor)[0]
            for index, (result, tensor) in enumerate(zip(results, tensors, strict=True))
        ]

    def _of_one(self, index: int) -> Collective:
        """Returns the collective of a single tensor of the group."""
        scope = self.scope.derived(str(index)) if self.is_grouped else self.scope
        return replace(self, scope=scope, is_grouped=False)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the result for a single tensor, recorded if autograd tracks it."""
        return self.apply([tensor])[0]


def _is_recorded(tensor: Any) -> bool:
    """Returns whether autograd tracks a tensor. Other objects are never tracked."""
    return getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()


class _Recorded(Function):
    """A collective as a node of the graph; a linear collective saves nothing that a backward pass could free.

    A backward pass for each result of a group therefore works: the other results' gradients count as zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, collective: Collective, known: list[Tensor] | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the results: `known`, if the collective has been run."""
        ctx.collective = collective
        if collective.is_linear:
            ctx.inputs = [tensor.to("meta") for tensor in tensors]
        else:
            ctx.save_for_backward(*tensors)
        return tuple(collective.run(tensors) if known is None else known)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        contiguous = [gradient.contiguous() for gradient in gradients]
        inputs = ctx.inputs if ctx.collective.is_linear else ctx.saved_tensors
        return None, None, *ctx.collective.derivative(inputs, contiguous)


@dataclass(frozen=True)
class _Reducing(Collective):
    """Min and Max distribute the gradient in equal parts to the ranks that have the extreme value."""

    how: Reduction = _SUM

    def options(self) -> CollectiveOptions:
        return self.scope.options(self.how)

    @property
    def is_linear(self) -> bool:
        return self.how.op in (core.SUM, core.AVERAGE)

    def slope(self, tensor: Tensor) -> Tensor:
        """Returns the result's derivative by this rank's elements, for a minimum, maximum or product."""
        op, scope = self.how.op, self.scope
        has_slope = op in (core.MIN, core.MAX, core.PRODUCT)
        if not has_slope or self.how.prescale != 1.0 or self.how.postscale != 1.0:
            what = "op=Min, Max or Product and factors" if has_slope else f"op={OP_NAMES[op]}"
            raise UnsupportedError(
                f"a reduction with {what} has no derivative here; use op=Sum or op=Average, pass "
                "tensor.detach(), or multiply by the factors yourself"
            )
        gathered = AllGather(scope.derived("everyone")).of(tensor.unsqueeze(0))
        index = scope.ranks.index(scope.context.rank)
        if op == core.PRODUCT:
            return torch.cat([gathered[:index], gathered[index + 1 :]]).prod(0)
        gathered = gathered.detach()
        extreme = gathered.amin(0) if op == core.MIN else gathered.amax(0)
        is_extreme = (gathered == extreme) | (gathered.isnan() & extreme.isnan())
        return is_extreme[index].to(tensor.dtype) / is_extreme.sum(0)


# Subclasses without fields need no decorator, which takes a millisecond of each import.
class AllReduce(_Reducing):
    """An all-reduce: every rank gets the same result."""

    collective = requests.ALLREDUCE

    def derivative(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        context, back = self.scope.context, replace(self, scope=self.scope.derived())
        if all(gradient.numel() == 1 for gradient in gradients):
            averaged_losses[context] = averaged_losses.get(context, 0) + 1
        if self.is_linear:
            return back.apply(gradients)
        totals = replace(back, how=_SUM).apply(gradients)
        return [total * self.slope(tensor) for total, tensor in zip(totals, inputs, strict=True)]


class ReduceScatter(_Reducing):
    """A reduce-scatter: each rank gets its rows."""

    collective = requests.REDUCESCATTER

    def derivative(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        gathered = AllGather(self.scope.derived(), self.is_grouped).apply(gradients)
        if not self.is_linear:
            return [total * self.slope(tensor) for total, tensor in zip(gathered, inputs, strict=True)]
        factor = self.how.prescale * self.how.postscale
        factor *= semantics.factor_of_scattered_gradients(len(self.scope.ranks))
        if self.how.op == core.AVERAGE:
            factor /= len(self.scope.ranks)
        return [total * factor for total in gathered]


def _how_moved() -> Reduction:
    return Reduction(semantics.op_of_moved_gradients())


class AllGather(Collective):
    """An all-gather: ranks may contribute different numbers of rows."""

    collective = requests.ALLGATHER

    def derivative(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        scope = self.scope
        rows = torch.tensor([[tensor.shape[0] for tensor in inputs]])
        before = AllGather(scope.derived("rows")).of(rows)[: scope.ranks.index(scope.context.rank)].sum(0)
        totals = AllReduce(scope.derived(), self.is_grouped, _how_moved()).apply(gradients)
        return [
            total.narrow(0, int(first), tensor.shape[0])
            for total, first, tensor in zip(totals, before, inputs, strict=True)
        ]


@dataclass(frozen=True)
class Broadcast(Collective):
    """A broadcast: the root's gradient is the sum over all ranks; other ranks' inputs have no influence."""

    collective = requests.BROADCAST
    root: int = 0

    def options(self) -> CollectiveOptions:
        return self.scope.options(root=self.root)

    def derivative(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        totals = AllReduce(self.scope.derived(), self.is_grouped, _how_moved()).apply(gradients)
        is_root = self.scope.context.rank == self.root
        return [total if is_root else torch.zeros_like(total) for total in totals]


def alltoall(
    scope: CollectiveScope, splits: Sequence[int] | None, tensor: Tensor
) -> tuple[Tensor, list[int]]:
    """Returns the received rows, recorded if autograd tracks the tensor; and the count from each rank."""
    if _is_recorded(tensor):
        refuse_derivative()
        return _AllToAll.apply(scope, splits, tensor)
    counts = None if splits is None else tuple(splits)
    options = CollectiveOptions(scope.name, scope.process_set, splits=counts)
    return run(scope.context, COLLECTIVES.single(scope.context, COUNTED_ALLTOALL, tensor, options))


class _AllToAll(Function):
    """An all-to-all: gradients return to where the rows came from; rows that were not sent get zeros."""

    @staticmethod
    def forward(
        ctx: Any, scope: CollectiveScope, splits: Sequence[int] | None, tensor: Tensor
    ) -> tuple[Tensor, list[int]]:
        result, received = alltoall(scope, splits, tensor.detach())
        ctx.scope, ctx.rows, ctx.received = scope, tensor.shape[0], received
        return result, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        back, _ = alltoall(ctx.scope.derived(), ctx.received, gradient.contiguous())
        if back.shape[0] < ctx.rows:
            back = torch.cat([back, back.new_zeros(ctx.rows - back.shape[0], *back.shape[1:])])
        return None, None, back


_NEW_TENSORS = frozenset(requests.BY_KIND.values())


class _RecordingCollectives(ArrayCollectives[Tensor, Tensor, Tensor | Sequence[int]]):
    """The collectives of torch. The forms that wait and return new tensors are recorded for autograd."""

    def run(self, collective: requests.Collective, tensor: Tensor, options: CollectiveOptions) -> Any:
        if collective in _NEW_TENSORS and _is_recorded(tensor):
            return _run_recorded(current(), collective, tensor, options)
        return super().run(collective, tensor, options)

    def run_group(
        self, collective: requests.Collective, tensors: Sequence[Tensor], options: CollectiveOptions
    ) -> list[Any]:
        context = current()
        if collective in _NEW_TENSORS and any(map(_is_recorded, tensors)):
            return _differentiable(context, collective, options, is_grouped=True).apply(tensors)
        return run(context, self.group(context, collective, tensors, options))


COLLECTIVES = _RecordingCollectives(adapter, __name__)


def _run_recorded(
    context: Context, collective: requests.Collective, tensor: Tensor, options: CollectiveOptions
) -> Any:
    if collective is not requests.ALLTOALL:
        return _differentiable(context, collective, options).of(tensor)
    scope = CollectiveScope(context, options.name, options.process_set)
    result, received = alltoall(scope, options.splits, tensor)
    return result if options.splits is None else (result, adapter.from_counts(received))


def _differentiable(
    context: Context, collective: requests.Collective, options: CollectiveOptions, is_grouped: bool = False
) -> Collective:
    scope = CollectiveScope(context, options.name, options.process_set)
    if collective is requests.ALLGATHER:
        return AllGather(scope, is_grouped)
    if collective is requests.BROADCAST:
        return Broadcast(scope, is_grouped, options.root)
    kind = AllReduce if collective is requests.ALLREDUCE else ReduceScatter
    return kind(scope, is_grouped, options.reduction)
