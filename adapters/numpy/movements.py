"""Collective operations on numpy arrays that only move them; `reductions` documents the common parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from sirtaki.bindings.default_context import current
from sirtaki.common.handles import Handle, Operation, run, start
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.numpy import operations
from sirtaki.numpy.arrays import Array
from sirtaki.numpy.operations import grouped, single


def allgather(
    tensor: ArrayLike,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
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
    return run(current(), single(operations.allgather, tensor, name, process_set))


def allgather_async(
    tensor: ArrayLike,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Works like `allgather`, without waiting."""
    return start(current(), single(operations.allgather, tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Works like `allgather`, for a list of arrays that complete together. Returns a list."""
    return run(current(), grouped("allgather", operations.allgather, tensors, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Array]]:
    """Works like `grouped_allgather`, without waiting."""
    return start(current(), grouped("allgather", operations.allgather, tensors, name, process_set))


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
    return run(current(), _alltoall(tensor, splits, name, process_set))


def alltoall_async(
    tensor: ArrayLike,
    splits: ArrayLike | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array | tuple[Array, Array]]:
    """Works like `alltoall`, without waiting."""
    return start(current(), _alltoall(tensor, splits, name, process_set))


def broadcast(
    tensor: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
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
    return run(current(), single(operations.broadcast(root_rank), tensor, name, process_set))


def broadcast_async(
    tensor: ArrayLike,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Works like `broadcast`, without waiting."""
    return start(current(), single(operations.broadcast(root_rank), tensor, name, process_set))


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Works like `broadcast`, into the array itself, which is returned."""
    return run(current(), single(operations.broadcast_in_place(root_rank), tensor, name, process_set))


def broadcast_async_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Works like `broadcast_`, without waiting."""
    return start(current(), single(operations.broadcast_in_place(root_rank), tensor, name, process_set))


def send(
    tensor: ArrayLike,
    destination: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
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
    run(current(), _send(tensor, destination, name, process_set))


def send_async(
    tensor: ArrayLike,
    destination: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Works like `send`, without waiting; `synchronize(handle)` returns the array."""
    return start(current(), _send(tensor, destination, name, process_set))


def recv(
    tensor: Array,
    source: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
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
    return run(current(), _receive(tensor, source, name, process_set))


def recv_async(
    tensor: Array,
    source: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Array]:
    """Works like `recv`, without waiting."""
    return start(current(), _receive(tensor, source, name, process_set))


def _alltoall(
    tensor: ArrayLike, splits: ArrayLike | None, name: str | None, process_set: ProcessSet
) -> Operation[Array | tuple[Array, Array]]:
    counts = None if splits is None else [int(split) for split in np.asarray(splits)]
    return operations.alltoall(tensor, counts, name, process_set)


def _send(tensor: ArrayLike, destination: int, name: str | None, process_set: ProcessSet) -> Operation[Array]:
    describe = operations.send((current().rank, destination))
    return single(describe, tensor, name, process_set)


def _receive(tensor: Array, source: int, name: str | None, process_set: ProcessSet) -> Operation[Array]:
    return single(operations.receive((source, current().rank)), tensor, name, process_set)
