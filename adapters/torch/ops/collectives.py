"""Collective operations on torch tensors.

Every rank of the process set has to call the same operations with the same names. Calls without a name are
numbered per kind, so they match as long as all ranks make them in the same order. Wrong arguments raise
ValueError, and nothing is queued. Failures between ranks raise a HorovodInternalError: MismatchError if the
ranks disagree (the next operation works), PeerLostError if a rank died.

Each operation has a form that waits and one, `..._async`, that returns a handle at once:
`synchronize(handle)` returns the result of the waiting form. Until then, do not change its inputs, nor touch
its outputs. Names that end in an underscore work in place. A grouped operation completes all its tensors
together; the lists have the same length on all ranks.

The forms that wait and return new tensors can be differentiated: `sirtaki.torch.ops.autograd` states how. The
others are not recorded for autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from sirtaki.common.ops.collectives import asynchronous
from sirtaki.common.ops.compression import compressed
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import (
    ALLREDUCE,
    REDUCESCATTER,
    Average,
    Collective,
    CollectiveOptions,
    Deadline,
    reducing_options,
)
from sirtaki.torch.ops.autograd import COLLECTIVES
from sirtaki.torch.ops.compression import Compression, Compressor
from sirtaki.torch.ops.tensors import code_of

__all__ = ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["send", "send_async", "recv", "recv_async"]

allreduce_ = COLLECTIVES.allreduce_
allreduce_async = COLLECTIVES.allreduce_async
allreduce_async_ = asynchronous(allreduce_)
grouped_allreduce_ = COLLECTIVES.grouped_allreduce_
grouped_allreduce_async = asynchronous(COLLECTIVES.grouped_allreduce)
grouped_allreduce_async_ = asynchronous(grouped_allreduce_)
reducescatter_async = asynchronous(COLLECTIVES.reducescatter)
grouped_reducescatter_async = asynchronous(COLLECTIVES.grouped_reducescatter)
allgather = COLLECTIVES.allgather
allgather_async = asynchronous(allgather)
grouped_allgather = COLLECTIVES.grouped_allgather
grouped_allgather_async = asynchronous(grouped_allgather)
alltoall = COLLECTIVES.alltoall
alltoall_async = asynchronous(alltoall)
broadcast = COLLECTIVES.broadcast
broadcast_ = COLLECTIVES.broadcast_
broadcast_async = asynchronous(broadcast)
broadcast_async_ = asynchronous(broadcast_)
send = COLLECTIVES.send
send_async = COLLECTIVES.send_async
recv = COLLECTIVES.recv
recv_async = asynchronous(recv)


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

    Example:
        mean_loss = hvd.allreduce(loss.detach(), name="loss")
        samples = hvd.allreduce(torch.tensor(len(inputs)), op=hvd.Sum)  # of all ranks: 8 on 2 ranks
    """
    options = reducing_options(name, process_set, op, average, prescale_factor, postscale_factor)
    if deadline is None:
        return _combined(ALLREDUCE, tensor, options, compression)
    if compression is not Compression.none or (tensor.requires_grad and torch.is_grad_enabled()):
        raise ValueError("an all-reduce with a deadline neither compresses nor is differentiated")
    return COLLECTIVES.run_with_deadline(tensor, options, Deadline(deadline, quorum))


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
    """Works like `allreduce`, for a list of tensors that complete together. Returns a list.

    Example:
        loss_of(model, inputs, targets).backward()
        gradients = hvd.grouped_allreduce([parameter.grad for parameter in model.parameters()])
    """
    options = reducing_options(name, process_set, op, average, prescale_factor, postscale_factor)
    return _combined_group(ALLREDUCE, tensors, options, compression)


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

    Example:
        rows = hvd.reducescatter(tensor, op=hvd.Sum)  # a row of the sum: row 0 on rank 0, row 1 on rank 1
    """
    options = reducing_options(name, process_set, op, None, prescale_factor, postscale_factor)
    return _combined(REDUCESCATTER, tensor, options, compression)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Works like `reducescatter`, for a list of tensors that complete together. Returns a list.

    Example:
        parts = hvd.grouped_reducescatter(tensors, op=hvd.Sum)
    """
    options = reducing_options(name, process_set, op, None, prescale_factor, postscale_factor)
    return _combined_group(REDUCESCATTER, tensors, options, compression)


def _combined(
    collective: Collective, tensor: Tensor, options: CollectiveOptions, compression: type[Compressor]
) -> Tensor:
    if compression is Compression.none:
        return COLLECTIVES.run(collective, tensor, options)
    code_of(tensor, options.name)
    (result,) = compressed(
        compression, [tensor], lambda small: [COLLECTIVES.run(collective, small[0], options)]
    )
    return result


def _combined_group(
    collective: Collective,
    tensors: Sequence[Tensor],
    options: CollectiveOptions,
    compression: type[Compressor],
) -> list[Tensor]:
    if compression is Compression.none:
        return COLLECTIVES.run_group(collective, tensors, options)
    for tensor in tensors:
        code_of(tensor, options.name)
    return compressed(compression, tensors, lambda small: COLLECTIVES.run_group(collective, small, options))
