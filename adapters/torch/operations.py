"""Collective operations on torch tensors, ready to run or to start; none is recorded for autograd."""

from __future__ import annotations

from torch import Tensor

from sirtaki.common import ops
from sirtaki.common.handles import Operation, spare_batch
from sirtaki.common.ops import Call, Reduction
from sirtaki.torch.tensors import (
    from_output,
    like,
    reducible_view,
    refuse_overlap,
    row_major_view,
    view,
    written,
)


def allreduce(tensor: Tensor, how: Reduction, name: str | None) -> Operation[Tensor]:
    """Into a new tensor."""
    source, batch = reducible_view(tensor, name), spare_batch()
    result, target = like(source)
    ops.describe_allreduce(batch, source, target, how, Call(name))
    return Operation(batch, (source, result), lambda *_: result)


def allreduce_in_place(tensor: Tensor, how: Reduction, name: str | None) -> Operation[Tensor]:
    """Into the tensor itself."""
    target, batch = reducible_view(tensor, name), spare_batch()
    if target.owner is not tensor:
        refuse_overlap(tensor, name)
    ops.describe_allreduce(batch, target, target.pointer, how, Call(name))
    return Operation(batch, target, lambda *_: written(tensor, target.owner))


def allgather(tensor: Tensor, name: str | None) -> Operation[Tensor]:
    """Into a new tensor."""
    source, batch = row_major_view(tensor, name), spare_batch()
    ops.describe_allgather(batch, source, Call(name))
    return Operation(batch, source, lambda context, batch: from_output(context.output(batch)))


def broadcast(tensor: Tensor, root: int, name: str | None) -> Operation[Tensor]:
    """Into a new tensor."""
    source, batch = view(tensor, name), spare_batch()
    result, target = like(source)
    ops.describe_broadcast(batch, source, target, root, Call(name))
    return Operation(batch, (source, result), lambda *_: result)


def broadcast_in_place(tensor: Tensor, root: int, name: str | None) -> Operation[Tensor]:
    """Into the tensor itself."""
    target, batch = view(tensor, name), spare_batch()
    if target.owner is not tensor:
        refuse_overlap(tensor, name)
    ops.describe_broadcast(batch, target, target.pointer, root, Call(name))
    return Operation(batch, target, lambda *_: written(tensor, target.owner))
