"""Collective operations on numpy arrays.

Every rank has to call the same operations with the same names. Calls without a name are numbered per kind,
so they match as long as all ranks make them in the same order. Wrong arguments raise ValueError, and nothing
is queued. What goes wrong between ranks raises a HorovodInternalError: MismatchError if they disagree (the
next operation works), PeerLostError if a rank died.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from sirtaki._core.current import current
from sirtaki.common import ops
from sirtaki.common.handles import Handle, Operation, run, spare_batch, start
from sirtaki.common.ops import Reduction, reduction
from sirtaki.common.tensor import TensorView
from sirtaki.numpy.arrays import Array, from_output, like, row_major_view, view, writable_view


def allreduce(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Combines an array over all ranks, element by element. All ranks must call it.

    Args:
        tensor: an array of any shape, the same on every rank; int32, int64 or a floating dtype.
        average: the older way to say op=Average (True) or op=Sum (False).
        name: how the ranks recognise the operation.
        op: Average (default), Sum, Min, Max or Product. An integer Average truncates toward zero.
        prescale_factor, postscale_factor: multiply before and after the combination.

    Returns:
        A new array of the same shape, order and dtype, the same on every rank.

    Raises:
        ValueError: op and average together, an unknown op, a dtype that cannot be reduced.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    return run(current(), _allreduce(tensor, how, name))


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """As `allreduce`, into the array itself, which is returned."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return run(current(), _allreduce_in_place(tensor, how, name))


def allreduce_async(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Array]:
    """As `allreduce`, without waiting: `synchronize(handle)` returns the array.

    Do not change `tensor` until then.
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    return start(current(), _allreduce(tensor, how, name))


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Array]:
    """As `allreduce_`, without waiting. Neither read nor change `tensor` before `synchronize(handle)`."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return start(current(), _allreduce_in_place(tensor, how, name))


def allgather(tensor: ArrayLike, name: str | None = None) -> Array:
    """Concatenates the ranks' arrays along dimension 0, in the order of ranks. All ranks must call it.

    Args:
        tensor: an array of one dimension at least and of any dtype in the core's table. Dimension 0 may
            differ between ranks (and be 0), the others may not.
        name: how the ranks recognise the operation.

    Returns:
        A new array, the same on every rank.

    Raises:
        ValueError: an array without dimensions.
        MismatchError: ranks disagree about dtype or the other dimensions.
        PeerLostError: a rank died.
    """
    return run(current(), _allgather(tensor, name))


def allgather_async(tensor: ArrayLike, name: str | None = None) -> Handle[Array]:
    """As `allgather`, without waiting: `synchronize(handle)` returns the array.

    Do not change `tensor` until then.
    """
    return start(current(), _allgather(tensor, name))


def broadcast(tensor: ArrayLike, root_rank: int, name: str | None = None) -> Array:
    """Copies rank `root_rank`'s array to all ranks. All ranks must call it.

    Args:
        tensor: an array of any dtype in the core's table, of one shape and dtype on all ranks.
        root_rank: whose array it is that all get.
        name: how the ranks recognise the operation.

    Returns:
        A new array with the root's values.

    Raises:
        ValueError: there is no rank `root_rank`.
        MismatchError: ranks disagree about dtype, shape or root.
        PeerLostError: a rank died.
    """
    return run(current(), _broadcast(tensor, root_rank, name))


def broadcast_(tensor: Array, root_rank: int, name: str | None = None) -> Array:
    """As `broadcast`, into the array itself, which is returned."""
    return run(current(), _broadcast_in_place(tensor, root_rank, name))


def broadcast_async(tensor: ArrayLike, root_rank: int, name: str | None = None) -> Handle[Array]:
    """As `broadcast`, without waiting: `synchronize(handle)` returns the array.

    Do not change `tensor` until then.
    """
    return start(current(), _broadcast(tensor, root_rank, name))


def broadcast_async_(tensor: Array, root_rank: int, name: str | None = None) -> Handle[Array]:
    """As `broadcast_`, without waiting. Neither read nor change `tensor` before `synchronize(handle)`."""
    return start(current(), _broadcast_in_place(tensor, root_rank, name))


def barrier() -> None:
    """Returns once every rank has called it.

    Raises:
        PeerLostError: a rank died.
    """
    ops.barrier(current())


def _allreduce(tensor: ArrayLike, how: Reduction, name: str | None) -> Operation[Array]:
    source, batch = view(tensor), spare_batch()
    result, target = like(source)
    ops.describe_allreduce(batch, source, target, how, name)
    return Operation(batch, (source, result), lambda *_: result)


def _allreduce_in_place(tensor: Array, how: Reduction, name: str | None) -> Operation[Array]:
    target, batch = writable_view(tensor), spare_batch()
    ops.describe_allreduce(batch, target, target.pointer, how, name)
    return Operation(batch, target, lambda *_: _copied_back(tensor, target))


def _allgather(tensor: ArrayLike, name: str | None) -> Operation[Array]:
    source, batch = row_major_view(tensor), spare_batch()
    ops.describe_allgather(batch, source, name)
    return Operation(batch, source, lambda context, batch: from_output(context.output(batch)))


def _broadcast(tensor: ArrayLike, root: int, name: str | None) -> Operation[Array]:
    source, batch = view(tensor), spare_batch()
    result, target = like(source)
    ops.describe_broadcast(batch, source, target, root, name)
    return Operation(batch, (source, result), lambda *_: result)


def _broadcast_in_place(tensor: Array, root: int, name: str | None) -> Operation[Array]:
    target, batch = writable_view(tensor), spare_batch()
    ops.describe_broadcast(batch, target, target.pointer, root, name)
    return Operation(batch, target, lambda *_: _copied_back(tensor, target))


def _copied_back(tensor: Array, target: TensorView) -> Array:
    if target.owner is not tensor:
        tensor[...] = target.owner
    return tensor
