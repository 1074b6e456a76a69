"""Collective operations on torch tensors that combine them.

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

from torch import Tensor

from sirtaki.bindings.default_context import current
from sirtaki.common.compression import compressed
from sirtaki.common.handles import Handle
from sirtaki.common.ops import Average, op_of_average, reduction
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.common.requests import ALLREDUCE, ALLREDUCE_IN_PLACE, REDUCESCATTER, CollectiveOptions
from sirtaki.torch.autograd import COLLECTIVES, AllReduce, Collective, CollectiveScope, ReduceScatter
from sirtaki.torch.compression import Compression, Compressor
from sirtaki.torch.tensors import code_of

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
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

    Returns:
        A new tensor of the same shape, order and dtype, the same on every rank.

    Raises:
        ValueError: op and average together, an unknown op, a tensor that cannot be combined, a set that this
            rank does not belong to.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    scope = CollectiveScope(current(), name, process_set)
    return _compressed(AllReduce(scope, how=how), [tensor], compression)[0]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """Works like `allreduce`, without waiting."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return COLLECTIVES.start(ALLREDUCE, tensor, CollectiveOptions(name, process_set, how))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Works like `allreduce`, into the tensor itself, which is returned."""
    if average is not None:
        op = op_of_average(average, op)
    return COLLECTIVES.allreduce_in_place(tensor, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """Works like `allreduce_`, without waiting."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return COLLECTIVES.start(ALLREDUCE_IN_PLACE, tensor, CollectiveOptions(name, process_set, how))


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


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """Works like `grouped_allreduce`, without waiting."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return COLLECTIVES.start_group(ALLREDUCE, tensors, CollectiveOptions(name, process_set, how))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Works like `grouped_allreduce`, into the tensors themselves, which are returned."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return COLLECTIVES.run_group(ALLREDUCE_IN_PLACE, tensors, CollectiveOptions(name, process_set, how))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """Works like `grouped_allreduce_`, without waiting."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return COLLECTIVES.start_group(ALLREDUCE_IN_PLACE, tensors, CollectiveOptions(name, process_set, how))


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


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """Works like `reducescatter`, without waiting."""
    how = reduction(op, None, prescale_factor, postscale_factor)
    return COLLECTIVES.start(REDUCESCATTER, tensor, CollectiveOptions(name, process_set, how))


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


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """Works like `grouped_reducescatter`, without waiting."""
    how = reduction(op, None, prescale_factor, postscale_factor)
    return COLLECTIVES.start_group(REDUCESCATTER, tensors, CollectiveOptions(name, process_set, how))


def _compressed(
    collective: Collective, tensors: Sequence[Tensor], compression: type[Compressor]
) -> list[Tensor]:
    """Runs a collective on compressed tensors, recorded for autograd."""
    if compression is Compression.none:
        return collective.apply(tensors)
    for tensor in tensors:
        code_of(tensor, collective.scope.name)
    return compressed(compression, tensors, collective.apply)
