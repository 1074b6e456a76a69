"""Collective operations on numpy arrays that only move them; `reductions` documents the common parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from sirtaki.common.collectives import Collectives
from sirtaki.common.handles import Handle
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.common.requests import (
    ALLGATHER,
    ALLTOALL,
    BROADCAST,
    BROADCAST_IN_PLACE,
    RECEIVE,
    SEND,
    CollectiveOptions,
)
from sirtaki.numpy import arrays
from sirtaki.numpy.arrays import Array

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "recv",
    "recv_async",
    "send",
    "send_async",
]

_collectives = Collectives(arrays)


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
    return _collectives.run(ALLGATHER, tensor, CollectiveOptions(name, process_set))


def allgather_async(
    tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """Works like `allgather`, without waiting."""
    return _collectives.start(ALLGATHER, tensor, CollectiveOptions(name, process_set))


def grouped_allgather(
    tensors: Sequence[ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Works like `allgather`, for a list of arrays that complete together. Returns a list."""
    return _collectives.run_group(ALLGATHER, tensors, CollectiveOptions(name, process_set))


def grouped_allgather_async(
    tensors: Sequence[ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Array]]:
    """Works like `grouped_allgather`, without waiting."""
    return _collectives.start_group(ALLGATHER, tensors, CollectiveOptions(name, process_set))


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
    return _collectives.run(ALLTOALL, tensor, CollectiveOptions(name, process_set, splits=_counts(splits)))


def alltoall_async(
    tensor: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array | tuple[Array, Array]]:
    """Works like `alltoall`, without waiting."""
    return _collectives.start(ALLTOALL, tensor, CollectiveOptions(name, process_set, splits=_counts(splits)))


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
    return _collectives.run(BROADCAST, tensor, CollectiveOptions(name, process_set, root=root_rank))


def broadcast_async(
    tensor: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """Works like `broadcast`, without waiting."""
    return _collectives.start(BROADCAST, tensor, CollectiveOptions(name, process_set, root=root_rank))


def broadcast_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Works like `broadcast`, into the array itself, which is returned."""
    return _collectives.run(BROADCAST_IN_PLACE, tensor, CollectiveOptions(name, process_set, root=root_rank))


def broadcast_async_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """Works like `broadcast_`, without waiting."""
    options = CollectiveOptions(name, process_set, root=root_rank)
    return _collectives.start(BROADCAST_IN_PLACE, tensor, options)


def send(
    tensor: ArrayLike, destination: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Sends an array to another rank, which has to call `recv`. Returns once it has arrived.

    Two ranks that send to each other at the same time have to use `send_async`, or one of them receives
    first.

    Args:
        tensor: an array of any dtype in the core's table.
        destination: a rank of the world.
        name: identifies the operation on both ranks; without a name they are numbered for each pair.
        process_set: a set to which both belong.

    Raises:
        ValueError: the rank is not in the set, or is this one.
        MismatchError: the two disagree about dtype or shape.
        PeerLostError: a rank died.
    """
    _collectives.run(SEND, np.asarray(tensor), CollectiveOptions(name, process_set, peer=destination))


def send_async(
    tensor: ArrayLike, destination: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """Works like `send`, without waiting; `synchronize(handle)` returns the array."""
    options = CollectiveOptions(name, process_set, peer=destination)
    return _collectives.start(SEND, np.asarray(tensor), options)


def recv(
    tensor: Array, source: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Overwrites an array with the one that rank `source` sends by `send`, and returns it.

    Args:
        tensor: an array of the shape and dtype of the sent one.
        source: a rank of the world.
        name, process_set: as for `send`.

    Raises:
        ValueError: the rank is not in the set, or is this one; a read-only array.
        MismatchError: the two disagree about dtype or shape.
        PeerLostError: a rank died.
    """
    return _collectives.run(RECEIVE, tensor, CollectiveOptions(name, process_set, peer=source))


def recv_async(
    tensor: Array, source: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """Works like `recv`, without waiting."""
    return _collectives.start(RECEIVE, tensor, CollectiveOptions(name, process_set, peer=source))


def _counts(splits: ArrayLike | None) -> list[int] | None:
    return None if splits is None else [int(split) for split in np.asarray(splits)]
