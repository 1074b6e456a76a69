"""Collective operations on numpy arrays.

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
from typing import Any, overload

from numpy.typing import ArrayLike

from sirtaki.common.array_collectives import ArrayCollectives
from sirtaki.common.deadlines import Deadline
from sirtaki.common.ops import Average, reduction
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.common.requests import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    REDUCESCATTER,
    CollectiveOptions,
)
from sirtaki.numpy import arrays
from sirtaki.numpy.arrays import Array

__all__ = ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["send", "send_async", "recv", "recv_async"]

_COLLECTIVES: ArrayCollectives[ArrayLike, Array] = ArrayCollectives(arrays)

allreduce_ = _COLLECTIVES.allreduce_
allreduce_async = _COLLECTIVES.allreduce_async
allreduce_async_ = _COLLECTIVES.allreduce_async_
grouped_allreduce_ = _COLLECTIVES.grouped_allreduce_
grouped_allreduce_async = _COLLECTIVES.grouped_allreduce_async
grouped_allreduce_async_ = _COLLECTIVES.grouped_allreduce_async_
reducescatter_async = _COLLECTIVES.reducescatter_async
grouped_reducescatter_async = _COLLECTIVES.grouped_reducescatter_async
allgather_async = _COLLECTIVES.allgather_async
grouped_allgather_async = _COLLECTIVES.grouped_allgather_async
alltoall_async = _COLLECTIVES.alltoall_async
broadcast_ = _COLLECTIVES.broadcast_
broadcast_async = _COLLECTIVES.broadcast_async
broadcast_async_ = _COLLECTIVES.broadcast_async_
recv = _COLLECTIVES.recv
recv_async = _COLLECTIVES.recv_async
send = _COLLECTIVES.send
send_async = _COLLECTIVES.send_async


@overload
def allreduce(
    tensor: ArrayLike,
    average: bool | None = ...,
    name: str | None = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: ProcessSet = ...,
    deadline: None = None,
    quorum: float = ...,
) -> Array: ...


@overload
def allreduce(
    tensor: ArrayLike,
    average: bool | None = ...,
    name: str | None = ...,
    op: int | None = ...,
    prescale_factor: float = ...,
    postscale_factor: float = ...,
    process_set: ProcessSet = ...,
    *,
    deadline: float,
    quorum: float = ...,
) -> tuple[Array, Sequence[int]]: ...


def allreduce(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    deadline: float | None = None,
    quorum: float = 0.5,
) -> Any:
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
        deadline: seconds from the first rank's call, after which the result is made without the ranks that
            are missing; None: it waits for all. A rank's n-th call with a name belongs to round n: a rank
            that is late receives the results of the rounds that it has missed, in order.
        quorum: with a deadline, the share of the ranks that must be there in any case.

    Returns:
        A new array of the same shape, order and dtype, the same on every rank. With a deadline, a pair of it
        and the ranks that have contributed, by whose number an average divides.

    Raises:
        ValueError: op and average together, an unknown op, a dtype that the op does not support, a set that
            this rank does not belong to.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    options = CollectiveOptions(name, process_set, how)
    if deadline is None:
        return _COLLECTIVES.run(ALLREDUCE, tensor, options)
    return _COLLECTIVES.run_with_deadline(tensor, options, Deadline(deadline, quorum))


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
    return _COLLECTIVES.run_group(ALLREDUCE, tensors, CollectiveOptions(name, process_set, how))


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
    return _COLLECTIVES.run(REDUCESCATTER, tensor, CollectiveOptions(name, process_set, how))


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
    return _COLLECTIVES.run_group(REDUCESCATTER, tensors, CollectiveOptions(name, process_set, how))


def allgather(
    tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Concatenates the ranks' arrays along dimension 0, in the order of ranks. All ranks of the set must
    call it.

    Args:
        tensor: an array with at least one dimension and any dtype in the core's table. Dimension 0 may differ
            between ranks (and be 0), the others may not.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        A new array, the same on every rank.

    Raises:
        ValueError: an array without dimensions, or a set that this rank does not belong to.
        MismatchError: ranks disagree about dtype or the other dimensions.
        PeerLostError: a rank died.
    """
    return _COLLECTIVES.run(ALLGATHER, tensor, CollectiveOptions(name, process_set))


def grouped_allgather(
    tensors: Sequence[ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Works like `allgather`, for a list of arrays that complete together. Returns a list."""
    return _COLLECTIVES.run_group(ALLGATHER, tensors, CollectiveOptions(name, process_set))


def alltoall(
    tensor: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """Sends each rank of the set its part of the rows, and returns the rows received. All must call it.

    Args:
        tensor: an array with at least one dimension, of any dtype in the core's table; ranks may pass
            different numbers of rows, but of the same shape.
        splits: the number of rows for each rank, in the order of ranks; None: equal parts.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        A new array with the received rows, in the order of ranks; with splits, a pair of it and an int32
        array of the number of rows from each.

    Raises:
        ValueError: an array without dimensions, rows that cannot be divided evenly, splits that are negative,
            too many or too few, or whose sum exceeds the rows.
        MismatchError: ranks disagree about dtype or the other dimensions.
        PeerLostError: a rank died.
    """
    return _COLLECTIVES.run(
        ALLTOALL, tensor, CollectiveOptions(name, process_set, splits=arrays.split_counts(splits))
    )


def broadcast(
    tensor: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Copies rank `root_rank`'s array to all ranks of the set. All of them must call it.

    Args:
        tensor: an array of any dtype in the core's table, of one shape and dtype on all ranks.
        root_rank: the rank whose array is copied: a rank of the world, also within a process set.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        A new array with the root's values.

    Raises:
        ValueError: rank `root_rank` does not exist, or does not belong to the set.
        MismatchError: ranks disagree about dtype, shape or root.
        PeerLostError: a rank died.
    """
    return _COLLECTIVES.run(BROADCAST, tensor, CollectiveOptions(name, process_set, root=root_rank))
