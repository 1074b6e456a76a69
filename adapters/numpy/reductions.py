"""Collective operations on numpy arrays that combine them.

Every rank of the process set has to call the same operations with the same names. Calls without a name are
numbered per kind, so they match as long as all ranks make them in the same order. Wrong arguments raise
ValueError, and nothing is queued. Failures between ranks raise a HorovodInternalError: MismatchError if the
ranks disagree (the next operation works), PeerLostError if a rank died.

Each operation has a form that waits and one, `..._async`, that returns a handle at once:
`synchronize(handle)` returns the result of the waiting form. Until then, do not change its inputs, nor touch
its outputs. Names that end in an underscore work in place. A grouped operation completes all its tensors
together; the lists have the same length on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from sirtaki.common.collectives import Collectives
from sirtaki.common.handles import Handle
from sirtaki.common.ops import Average, op_of_average, reduction
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.common.requests import ALLREDUCE, ALLREDUCE_IN_PLACE, REDUCESCATTER, CollectiveOptions
from sirtaki.numpy import arrays
from sirtaki.numpy.arrays import Array

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

_collectives = Collectives(arrays)


def allreduce(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Combines an array over all ranks of the set, element by element. All of them must call it.

    Args:
        tensor: an array of any shape, the same on every rank, of a numeric dtype; bool for Min, Max and
            Product; complex for Sum and Average.
        average: the older form of op=Average (True) or op=Sum (False).
        name: identifies the operation on all ranks.
        op: Average (default), Sum, Min, Max, Product, or Adasum (floating dtypes). An integer Average
            truncates toward zero.
        prescale_factor, postscale_factor: multiply before and after the combination.
        process_set: the ranks that take part.

    Returns:
        A new array of the same shape, order and dtype, the same on every rank.

    Raises:
        ValueError: op and average together, an unknown op, a dtype that the op does not support, a set that
            this rank does not belong to.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    return _collectives.run(ALLREDUCE, tensor, CollectiveOptions(name, process_set, how))


def allreduce_async(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Works like `allreduce`, without waiting."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return _collectives.start(ALLREDUCE, tensor, CollectiveOptions(name, process_set, how))


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Works like `allreduce`, into the array itself, which is returned."""
    if average is not None:
        op = op_of_average(average, op)
    return _collectives.allreduce_in_place(tensor, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Works like `allreduce_`, without waiting."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return _collectives.start(ALLREDUCE_IN_PLACE, tensor, CollectiveOptions(name, process_set, how))


def grouped_allreduce(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Works like `allreduce`, for a list of arrays that complete together. Returns a list."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return _collectives.run_group(ALLREDUCE, tensors, CollectiveOptions(name, process_set, how))


def grouped_allreduce_async(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Array]]:
    """Works like `grouped_allreduce`, without waiting."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return _collectives.start_group(ALLREDUCE, tensors, CollectiveOptions(name, process_set, how))


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Works like `grouped_allreduce`, into the arrays themselves, which are returned."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return _collectives.run_group(ALLREDUCE_IN_PLACE, tensors, CollectiveOptions(name, process_set, how))


def grouped_allreduce_async_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Array]]:
    """Works like `grouped_allreduce_`, without waiting."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return _collectives.start_group(ALLREDUCE_IN_PLACE, tensors, CollectiveOptions(name, process_set, how))


def reducescatter(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Combines an array over all ranks of the set, and gives each its part of the rows. All of them must
    call it.

    Args:
        tensor: an array with at least one dimension, of the same shape on every rank and of a dtype as for
            `allreduce`.
        name: identifies the operation on all ranks.
        op: Average, Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor, postscale_factor: multiply before and after the combination.

    Returns:
        A new array: this rank's rows of the combination. Dimension 0 is divided in the order of ranks; if it
        does not divide evenly, the first `rows % size` ranks get one more row.

    Raises:
        ValueError: an unknown op, a dtype that the op does not support, an array without dimensions.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.
    """
    how = reduction(op, None, prescale_factor, postscale_factor)
    return _collectives.run(REDUCESCATTER, tensor, CollectiveOptions(name, process_set, how))


def reducescatter_async(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Array]:
    """Works like `reducescatter`, without waiting."""
    how = reduction(op, None, prescale_factor, postscale_factor)
    return _collectives.start(REDUCESCATTER, tensor, CollectiveOptions(name, process_set, how))


def grouped_reducescatter(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Works like `reducescatter`, for a list of arrays that complete together. Returns a list."""
    how = reduction(op, None, prescale_factor, postscale_factor)
    return _collectives.run_group(REDUCESCATTER, tensors, CollectiveOptions(name, process_set, how))


def grouped_reducescatter_async(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Array]]:
    """Works like `grouped_reducescatter`, without waiting."""
    how = reduction(op, None, prescale_factor, postscale_factor)
    return _collectives.start_group(REDUCESCATTER, tensors, CollectiveOptions(name, process_set, how))
