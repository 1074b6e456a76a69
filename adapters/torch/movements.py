"""Collective operations on torch tensors that only move them; `reductions` documents the common parts."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from sirtaki.bindings.default_context import current
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
from sirtaki.torch import autograd
from sirtaki.torch.autograd import COLLECTIVES, AllGather, Broadcast, CollectiveScope
from sirtaki.torch.tensors import from_counts

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


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Works like `allgather`, without waiting."""
    return COLLECTIVES.start(ALLGATHER, tensor, CollectiveOptions(name, process_set))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Works like `allgather`, for a list of tensors that complete together. Returns a list."""
    return AllGather(CollectiveScope(current(), name, process_set), is_grouped=True).apply(tensors)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Tensor]]:
    """Works like `grouped_allgather`, without waiting."""
    return COLLECTIVES.start_group(ALLGATHER, tensors, CollectiveOptions(name, process_set))


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
    result, received = autograd.alltoall(scope, _counts(splits), tensor)
    return result if splits is None else (result, from_counts(received))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor | tuple[Tensor, Tensor]]:
    """Works like `alltoall`, without waiting."""
    return COLLECTIVES.start(ALLTOALL, tensor, CollectiveOptions(name, process_set, splits=_counts(splits)))


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


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Works like `broadcast`, without waiting."""
    return COLLECTIVES.start(BROADCAST, tensor, CollectiveOptions(name, process_set, root=root_rank))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Works like `broadcast`, into the tensor itself, which is returned."""
    return COLLECTIVES.run(BROADCAST_IN_PLACE, tensor, CollectiveOptions(name, process_set, root=root_rank))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Works like `broadcast_`, without waiting."""
    return COLLECTIVES.start(BROADCAST_IN_PLACE, tensor, CollectiveOptions(name, process_set, root=root_rank))


def send(
    tensor: Tensor, destination: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Sends a tensor to another rank, which has to call `recv`. Returns once it has arrived.

    Two ranks that send to each other at the same time have to use `send_async`, or one of them receives
    first. Autograd does not track sends.

    Args:
        tensor: a dense tensor of any dtype in the core's table.
        destination: a rank of the world.
        name: identifies the operation on both ranks; without a name they are numbered for each pair.
        process_set: a set to which both belong.

    Raises:
        ValueError: the rank is not in the set, or is this one.
        MismatchError: the two disagree about dtype or shape.
        PeerLostError: a rank died.
    """
    COLLECTIVES.run(SEND, tensor, CollectiveOptions(name, process_set, peer=destination))


def send_async(
    tensor: Tensor, destination: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Works like `send`, without waiting; `synchronize(handle)` returns the tensor."""
    return COLLECTIVES.start(SEND, tensor, CollectiveOptions(name, process_set, peer=destination))


def recv(
    tensor: Tensor, source: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrites a tensor with the one that rank `source` sends by `send`, and returns it.

    Args:
        tensor: a dense tensor of the shape and dtype of the sent one.
        source: a rank of the world.
        name, process_set: as for `send`.

    Raises:
        ValueError: the rank is not in the set, or is this one.
        MismatchError: the two disagree about dtype or shape.
        PeerLostError: a rank died.
    """
    return COLLECTIVES.run(RECEIVE, tensor, CollectiveOptions(name, process_set, peer=source))


def recv_async(
    tensor: Tensor, source: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """Works like `recv`, without waiting."""
    return COLLECTIVES.start(RECEIVE, tensor, CollectiveOptions(name, process_set, peer=source))


def _counts(splits: Tensor | Sequence[int] | None) -> list[int] | None:
    """Returns the splits as numbers. Raises ValueError if they are invalid."""
    if splits is None:
        return None
    if isinstance(splits, Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError(
                f"splits has dtype {splits.dtype} and shape {list(splits.shape)}, but it has to be one "
                "number a rank: a list, or an int32 tensor of one dimension"
            )
        return splits.tolist()
    try:
        return [operator.index(count) for count in splits]
    except TypeError:
        raise ValueError(f"splits has to be a list of whole numbers, one a rank, not {splits!r}") from None
