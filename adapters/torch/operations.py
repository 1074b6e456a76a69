"""Collective operations on torch tensors, ready to run or to start; none is recorded for autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.bindings.request import Batch
from sirtaki.common import ops
from sirtaki.common.handles import Operation, spare_batch
from sirtaki.common.ops import Call, Reduction
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.torch import device
from sirtaki.torch.tensors import (
    from_output,
    like,
    reducible_view,
    refuse_overlap,
    row_major_view,
    rows_like,
    view,
    written,
)

# Describes one tensor's request in a batch; returns the objects to keep alive, and the finisher.
Finish = Callable[[Context, Batch], Any]
Describe = Callable[[Batch, Tensor, Call, int], "tuple[Any, Finish]"]


def single(
    context: Context,
    describe: Describe,
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation[Any]:
    """Prepares an operation on one tensor."""
    batch = spare_batch()
    keep, finish = describe(batch, tensor, ops.call(context, name, process_set), 0)
    return Operation(batch, keep, finish, device)


def grouped(
    context: Context,
    kind: str,
    describe: Describe,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
) -> Operation[list[Any]]:
    """Prepares operations of a kind ("allreduce", ...) that complete together."""
    batch = spare_batch(len(tensors))
    calls = ops.group_calls(context, kind, name, process_set, len(tensors))
    parts = [
        describe(batch, tensor, call, index)
        for index, (tensor, call) in enumerate(zip(tensors, calls, strict=True))
    ]
    return Operation(
        batch, [keep for keep, _ in parts], lambda *ended: [finish(*ended) for _, finish in parts], device
    )


def allreduce(how: Reduction) -> Describe:
    """Describes an all-reduce into new tensors."""

    def describe(batch: Batch, tensor: Tensor, call: Call, index: int) -> tuple[Any, Finish]:
        source = reducible_view(tensor, call.name)
        result, target = like(source)
        ops.describe_allreduce(batch, source, target, how, call, index)
        return (source, result), lambda *_: result

    return describe


def allreduce_in_place(how: Reduction) -> Describe:
    """Describes an all-reduce into the tensors themselves."""

    def describe(batch: Batch, tensor: Tensor, call: Call, index: int) -> tuple[Any, Finish]:
        target = reducible_view(tensor, call.name)
        if target.owner is not tensor:
            refuse_overlap(tensor, call.name)
        ops.describe_allreduce(batch, target, target.pointer, how, call, index)
        return target, lambda *_: written(tensor, target.owner)

    return describe


def reducescatter(how: Reduction, context: Context, process_set: ProcessSet) -> Describe:
    """Describes a reduce-scatter of this rank's rows, into new tensors."""

    def describe(batch: Batch, tensor: Tensor, call: Call, index: int) -> tuple[Any, Finish]:
        source = row_major_view(tensor, call.name)
        rows = ops.own_rows(context, source.shape[0], process_set) if source.shape else 0
        result, target = rows_like(source, rows)
        ops.describe_reducescatter(batch, source, target, how, call, index)
        return (source, result), lambda *_: result

    return describe


def allgather(batch: Batch, tensor: Tensor, call: Call, index: int) -> tuple[Any, Finish]:
    """Describes an all-gather into new tensors."""
    source = row_major_view(tensor, call.name)
    ops.describe_allgather(batch, source, call, index)
    return source, lambda context, batch: from_output(context, batch, index)


def alltoall(splits: Sequence[int] | None) -> Describe:
    """Describes an all-to-all into a new tensor; the result is that and the number of rows from each rank."""

    def describe(batch: Batch, tensor: Tensor, call: Call, index: int) -> tuple[Any, Finish]:
        source = row_major_view(tensor, call.name)
        ops.describe_alltoall(batch, source, splits, call, index)

        def finish(context: Context, batch: Batch) -> tuple[Tensor, list[int]]:
            received = context.received_splits(batch, index)
            return from_output(context, batch, index), received

        return source, finish

    return describe


def broadcast(root: int) -> Describe:
    """Describes a broadcast into new tensors."""

    def describe(batch: Batch, tensor: Tensor, call: Call, index: int) -> tuple[Any, Finish]:
        source = view(tensor, call.name)
        result, target = like(source)
        ops.describe_broadcast(batch, source, target, root, call, index)
        return (source, result), lambda *_: result

    return describe


def broadcast_in_place(root: int) -> Describe:
    """Describes a broadcast into the tensors themselves."""

    def describe(batch: Batch, tensor: Tensor, call: Call, index: int) -> tuple[Any, Finish]:
        target = view(tensor, call.name)
        if target.owner is not tensor:
            refuse_overlap(tensor, call.name)
        ops.describe_broadcast(batch, target, target.pointer, root, call, index)
        return target, lambda *_: written(tensor, target.owner)

    return describe


def send(ranks: tuple[int, int]) -> Describe:
    """Describes a send from a tensor, which is not changed."""

    def describe(batch: Batch, tensor: Tensor, call: Call, index: int) -> tuple[Any, Finish]:
        source = view(tensor, call.name)
        ops.describe_send(batch, source, ranks, call, index)
        return source, lambda *_: tensor

    return describe


def receive(ranks: tuple[int, int]) -> Describe:
    """Describes a receive into a tensor."""

    def describe(batch: Batch, tensor: Tensor, call: Call, index: int) -> tuple[Any, Finish]:
        target = view(tensor, call.name)
        if target.owner is not tensor:
            refuse_overlap(tensor, call.name)
        ops.describe_send(batch, target, ranks, call, index)
        return target, lambda *_: written(tensor, target.owner)

    return describe
