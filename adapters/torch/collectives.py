"""Collective operations on torch tensors.

Every rank of the process set has to call the same operations with the same names. Calls without a name are
numbered per kind, so they match as long as all ranks make them in the same order. Wrong arguments raise
ValueError, and nothing is queued. Failures between ranks raise a HorovodInternalError: MismatchError if the
ranks disagree (the next operation works), PeerLostError if a rank died.

Each operation has a form that waits and one, `..._async`, that returns a handle at once:
`synchronize(handle)` returns the result of the waiting form. Until then, do not change its inputs, nor touch
its outputs. Names that end in an underscore work in place. A grouped operation completes all its tensors
together; the lists have the same length on all ranks.

The forms that wait and return new tensors can be differentiated: `sirtaki.torch.autograd` states how. The
others are not recorded for autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from sirtaki.bindings.default_context import current
from sirtaki.common.compression import compressed
from sirtaki.common.deadlines import Deadline
from sirtaki.common.ops import Average, reduction
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.common.requests import CollectiveOptions
from sirtaki.torch import autograd
from sirtaki.torch.autograd import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    CollectiveScope,
    ReduceScatter,
)
from sirtaki.torch.compression import Compression, Compressor
from sirtaki.torch.tensors import code_of, from_counts, split_counts

__all__ = ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["send", "send_async", "recv", "recv_async"]

allreduce_ = COLLECTIVES.allreduce_
allreduce_async = COLLECTIVES.allreduce_async
allreduce_async_ = COLLECTIVES.allreduce_async_
grouped_allreduce_ = COLLECTIVES.grouped_allreduce_
grouped_allreduce_async = COLLECTIVES.grouped_allreduce_async
grouped_allreduce_async_ = COLLECTIVES.grouped_allreduce_async_
reducescatter_async = COLLECTIVES.reducescatter_async
grouped_reducescatter_async = COLLECTIVES.grouped_reducescatter_async
allgather_async = COLLECTIVES.allgather_async
grouped_allgather_async = COLLECTIVES.grouped_allgather_async
alltoall_async = COLLECTIVES.alltoall_async
broadcast_ = COLLECTIVES.broadcast_
broadcast_async = COLLECTIVES.broadcast_async
broadcast_async_ = COLLECTIVES.broadcast_async_
recv = COLLECTIVES.recv
recv_async = COLLECTIVES.recv_async
send = COLLECTIVES.send
send_async = COLLECTIVES.send_async


@overload
def allreduce(
    tensor: Tensor,
    average: bool | None = ...,
    name: str | None = ...,
    compression: type[Compressor] = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: ProcessSet = ...,
    deadline: None = None,
    quorum: float = ...,
) -> Tensor: ...


@overload
def allreduce(
    tensor: Tensor,
    average: bool | None = ...,
    name: str | None = ...,
    compression: type[Compressor] = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: ProcessSet = ...,
    *,
    deadline: float,
    quorum: float = ...,
) -> tuple[Tensor, Sequence[int]]: ...


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    deadline: float | None = None,
    quorum: float = 0.5,
) -> Any:
    """Combines a tensor over all ranks of the set, element by element. All of them must call it.

    Args:
        tensor: a dense tensor of any shape, the same on every rank, of a numeric dtype; bool for Min,
            Max and Product; complex for Sum and Average.
        average: the older form of op=Average (True) or op=Sum (False).
        name: identifies the operation on all ranks.
        compression: Compression.fp16 or Compression.bf16 to exchange floating elements in 16 bits.
        op: Average (default), Sum, Min, Max, Product, or Adasum (floating dtypes). An integer Average
            truncates toward zero.
        prescale_factor, postscale_factor: multiply before and after the combination.
        process_set: the ranks that take part.
        deadline: seconds from the first rank's call, after which the result is made without the ranks that
            are missing; None: it waits for all. A rank's n-th call with a name belongs to round n: a rank
            that is late receives the results of the rounds that it has missed, in order.
        quorum: with a deadline, the share of the ranks that must be there in any case.

    Returns:
        A new tensor of the same shape, order and dtype, the same on every rank. With a deadline, a pair of it
        and the ranks that have contributed, by whose number an average divides.

    Raises:
        ValueError: op and average together, an unknown op, a tensor that cannot be combined, a set that this
            rank does not belong to.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    if deadline is not None:
        if compression is not Compression.none or (tensor.requires_grad and torch.is_grad_enabled()):
            raise ValueError("an all-reduce with a deadline neither compresses nor is differentiated")
        options = CollectiveOptions(name, process_set, how)
        return COLLECTIVES.run_with_deadline(tensor, options, Deadline(deadline, quorum))
    scope = CollectiveScope(current(), name, process_set)
    return _compressed(AllReduce(scope, how=how), [tensor], compression)[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Works like `allreduce`, for a list of tensors that complete together. Returns a list."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    scope = CollectiveScope(current(), name, process_set)
    return _compressed(AllReduce(scope, True, how), tensors, compression)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combines a tensor over all ranks of the set, and gives each its part of the rows. All must call it.

    Args:
        tensor: a dense tensor with at least one dimension, of the same shape on every rank and of a dtype as
            for `allreduce`.
        name: identifies the operation on all ranks.
        compression: Compression.fp16 or Compression.bf16 to exchange floating elements in 16 bits.
        op: Average, Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor, postscale_factor: multiply before and after the combination.

    Returns:
        A new tensor: this rank's rows of the combination. Dimension 0 is divided in the order of ranks; if it
        does not divide evenly, the first `rows % size` ranks get one more row.

    Raises:
        ValueError: an unknown op, a tensor that cannot be combined or has no dimensions.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.
    """
    how = reduction(op, None, prescale_factor, postscale_factor)
    scope = CollectiveScope(current(), name, process_set)
    return _compressed(ReduceScatter(scope, how=how), [tensor], compression)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Works like `reducescatter`, for a list of tensors that complete together. Returns a list."""
    how = reduction(op, None, prescale_factor, postscale_factor)
    scope = CollectiveScope(current(), name, process_set)
    return _compressed(ReduceScatter(scope, True, how), tensors, compression)


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenates the ranks' tensors along dimension 0, in their order. All ranks of the set must call it.

    Args:
        tensor: a dense tensor with at least one dimension and any dtype in the core's table. Dimension 0
            may differ between ranks (and be 0), the others may not.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        A new tensor, the same on every rank.

    Raises:
        ValueError: a tensor without dimensions, or a set that this rank does not belong to.
        MismatchError: ranks disagree about dtype or the other dimensions.
        PeerLostError: a rank died.
    """
    return AllGather(CollectiveScope(current(), name, process_set)).of(tensor)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Works like `allgather`, for a list of tensors that complete together. Returns a list."""
    return AllGather(CollectiveScope(current(), name, process_set), is_grouped=True).apply(tensors)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends each rank of the set its part of the rows, and returns the rows received from all.

    All ranks of the set must call it.

    Args:
        tensor: a dense tensor with at least one dimension, of any dtype in the core's table; ranks may pass
            different numbers of rows, but of the same shape.
        splits: the number of rows for each rank, in their order, as an int32 tensor or a list; remaining rows
            are not sent. None: equal parts.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        A new tensor with the received rows, in the order of ranks; with splits, a pair of it and an int32
        tensor of the number of rows from each.

    Raises:
        ValueError: a tensor without dimensions, rows that cannot be divided evenly, splits that are negative,
            not int32, too many or too few, or whose sum exceeds the rows.
        MismatchError: ranks disagree about dtype or the other dimensions.
        PeerLostError: a rank died.
    """
    scope = CollectiveScope(current(), name, process_set)
    result, received = autograd.alltoall(scope, split_counts(splits), tensor)
    return result if splits is None else (result, from_counts(received))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copies rank `root_rank`'s tensor to all ranks of the set. All of them must call it.

    Args:
        tensor: a dense tensor of any dtype in the core's table, of one shape and dtype on all ranks.
        root_rank: the rank whose tensor is copied: a rank of the world, also within a process set.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        A new tensor with the root's values.

    Raises:
        ValueError: rank `root_rank` does not exist, or does not belong to the set.
        MismatchError: ranks disagree about dtype, shape or root.
        PeerLostError: a rank died.
    """
    return Broadcast(CollectiveScope(current(), name, process_set), root=root_rank).of(tensor)


def _compressed(
    collective: Collective, tensors: Sequence[Tensor], compression: type[Compressor]
) -> list[Tensor]:
    """Runs a collective on compressed tensors, recorded for autograd."""
    if compression is Compression.none:
        return collective.apply(tensors)
    for tensor in tensors:
        code_of(tensor, collective.scope.name)
    return compressed(compression, tensors, collective.apply)
