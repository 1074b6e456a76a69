"""Collective operations on torch tensors that only move them; `reductions` says what all have in common."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from sirtaki._core.current import current
from sirtaki.common.handles import Handle, Operation, run, start
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.torch import autograd, operations
from sirtaki.torch.autograd import AllGather, Broadcast, Where
from sirtaki.torch.operations import grouped, single


def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Concatenates the ranks' tensors along dimension 0, in their order. All ranks of the set must call it.

    Args:
        tensor: a dense tensor of one dimension at least and of any dtype in the core's table.
            Dimension 0 may differ between ranks (and be 0), the others may not.
        name: how the ranks recognise the operation.
        process_set: the ranks that take part.

    Returns:
        A new tensor, the same on every rank.

    Raises:
        ValueError: a tensor without dimensions, or a set that this rank does not belong to.
        MismatchError: ranks disagree about dtype or the other dimensions.
        PeerLostError: a rank died.
    """
    return AllGather(Where(current(), name, process_set)).of(tensor)


def allgather_async(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `allgather`, without waiting."""
    context = current()
    return start(context, single(context, operations.allgather, tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """As `allgather`, of a list of tensors that complete together. Returns the list of results."""
    return AllGather(Where(current(), name, process_set), is_grouped=True).apply(tensors)


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """As `grouped_allgather`, without waiting."""
    context = current()
    return start(context, grouped(context, "allgather", operations.allgather, tensors, name, process_set))


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sends each rank of the set its part of the rows, and returns what all have sent here.

    All ranks of the set must call it.

    Args:
        tensor: a dense tensor of one dimension at least, of any dtype in the core's table; ranks may give
            different numbers of rows, but of the same shape.
        splits: how many of the rows go to each rank, in their order, as an int32 tensor or a list; what is
            left over goes nowhere. None: as many to each.
        name: how the ranks recognise the operation.
        process_set: the ranks that take part.

    Returns:
        A new tensor with the rows that came, in the order of ranks; with splits, a pair of it and an int32
        tensor of the number of rows that came from each.

    Raises:
        ValueError: a tensor without dimensions, rows that cannot be cut evenly, splits that are negative,
            not int32, too many or too few, or add up to more than there is.
        MismatchError: ranks disagree about dtype or the other dimensions.
        PeerLostError: a rank died.
    """
    where = Where(current(), name, process_set)
    return _with_counts(splits, *autograd.alltoall(where, _counts(splits), tensor))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor | tuple[Tensor, Tensor]]:
    """As `alltoall`, without waiting."""
    context = current()
    operation = single(context, operations.alltoall(_counts(splits)), tensor, name, process_set)
    both = operation.finish
    operation.finish = lambda *ended: _with_counts(splits, *both(*ended))
    return start(context, operation)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Copies rank `root_rank`'s tensor to all ranks of the set. All of them must call it.

    Args:
        tensor: a dense tensor of any dtype in the core's table, of one shape and dtype on all ranks.
        root_rank: whose tensor it is that all get: a rank of the world, also within a process set.
        name: how the ranks recognise the operation.
        process_set: the ranks that take part.

    Returns:
        A new tensor with the root's values.

    Raises:
        ValueError: rank `root_rank` does not exist, or does not belong to the set.
        MismatchError: ranks disagree about dtype, shape or root.
        PeerLostError: a rank died.
    """
    return Broadcast(Where(current(), name, process_set), root=root_rank).of(tensor)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `broadcast`, without waiting."""
    context, describe = current(), operations.broadcast(root_rank)
    return start(context, single(context, describe, tensor, name, process_set))


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """As `broadcast`, into the tensor itself, which is returned."""
    context, describe = current(), operations.broadcast_in_place(root_rank)
    return run(context, single(context, describe, tensor, name, process_set))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `broadcast_`, without waiting."""
    context, describe = current(), operations.broadcast_in_place(root_rank)
    return start(context, single(context, describe, tensor, name, process_set))


def send(
    tensor: Tensor,
    destination: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Sends a tensor to one other rank, which has to call `recv`. Returns once it is there.

    Two ranks that send to each other at the same time have to use `send_async`, or one of them receives
    first. Autograd does not follow what is sent.

    Args:
        tensor: a dense tensor of any dtype in the core's table.
        destination: a rank of the world.
        name: how the two ranks recognise the operation; without a name they are numbered for each pair.
        process_set: both belong to it.

    Raises:
        ValueError: there is no such rank in the set, or it is this one.
        MismatchError: the two disagree about dtype or shape.
        PeerLostError: a rank died.
    """
    run(current(), _send(tensor, destination, name, process_set))


def send_async(
    tensor: Tensor,
    destination: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `send`, without waiting; `synchronize(handle)` returns the tensor."""
    return start(current(), _send(tensor, destination, name, process_set))


def recv(
    tensor: Tensor,
    source: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrites a tensor with what rank `source` sends by `send`, and returns it.

    Args:
        tensor: a dense tensor of the shape and dtype of what is sent.
        source: a rank of the world.
        name, process_set: as for `send`.

    Raises:
        ValueError: there is no such rank in the set, or it is this one.
        MismatchError: the two disagree about dtype or shape.
        PeerLostError: a rank died.
    """
    return run(current(), _receive(tensor, source, name, process_set))


def recv_async(
    tensor: Tensor,
    source: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `recv`, without waiting."""
    return start(current(), _receive(tensor, source, name, process_set))


def _send(tensor: Tensor, destination: int, name: str | None, process_set: ProcessSet) -> Operation[Tensor]:
    context = current()
    return single(context, operations.send((context.rank, destination)), tensor, name, process_set)


def _receive(tensor: Tensor, source: int, name: str | None, process_set: ProcessSet) -> Operation[Tensor]:
    context = current()
    return single(context, operations.receive((source, context.rank)), tensor, name, process_set)


def _with_counts(
    splits: Tensor | Sequence[int] | None, result: Tensor, received: list[int]
) -> Tensor | tuple[Tensor, Tensor]:
    """What an all-to-all returns: how many rows came from each rank only to who has given splits."""
    return result if splits is None else (result, torch.tensor(received, dtype=torch.int32))


def _counts(splits: Tensor | Sequence[int] | None) -> list[int] | None:
    """The splits as numbers. Raises ValueError if they are none."""
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
