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
from typing import Any

from numpy.typing import ArrayLike

from sirtaki.bindings.default_context import current
from sirtaki.common.handles import Handle, run, start
from sirtaki.common.ops import Average, Call, reduction
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.common.repeated import keep_described, run_again
from sirtaki.numpy import operations
from sirtaki.numpy.arrays import Array, address_of, is_plain
from sirtaki.numpy.operations import grouped, single


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
    return run(current(), single(operations.allreduce(how), tensor, name, process_set))


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
    return start(current(), single(operations.allreduce(how), tensor, name, process_set))


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
    context = current()
    key: Any = None
    if average is None and is_plain(tensor):
        number = process_set.number(context)
        key = (name, op, prescale_factor, postscale_factor, number, tensor.dtype, tensor.shape)
        if run_again(context, key, address_of(tensor), tensor):
            return tensor
    describe = operations.allreduce_in_place(reduction(op, average, prescale_factor, postscale_factor))
    result = run(context, single(describe, tensor, name, process_set))
    if key is not None:
        call = Call(name, process_set.number(context))
        keep_described(key, lambda batch: describe(batch, tensor, call, 0))
    return result


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
    return start(current(), single(operations.allreduce_in_place(how), tensor, name, process_set))


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
    return run(current(), grouped("allreduce", operations.allreduce(how), tensors, name, process_set))


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
    return start(current(), grouped("allreduce", operations.allreduce(how), tensors, name, process_set))


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
    return run(
        current(), grouped("allreduce", operations.allreduce_in_place(how), tensors, name, process_set)
    )


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
    return start(
        current(), grouped("allreduce", operations.allreduce_in_place(how), tensors, name, process_set)
    )


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
    describe = operations.reducescatter(how, current(), process_set)
    return run(current(), single(describe, tensor, name, process_set))


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
    describe = operations.reducescatter(how, current(), process_set)
    return start(current(), single(describe, tensor, name, process_set))


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
    describe = operations.reducescatter(how, current(), process_set)
    return run(current(), grouped("reducescatter", describe, tensors, name, process_set))


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
    describe = operations.reducescatter(how, current(), process_set)
    return start(current(), grouped("reducescatter", describe, tensors, name, process_set))
