"""Collective operations on torch tensors.

Every rank has to call the same operations with the same names. Calls without a name are numbered per kind,
so they match as long as all ranks make them in the same order. Wrong arguments raise ValueError, and nothing
is queued. What goes wrong between ranks raises a HorovodInternalError: MismatchError if they disagree (the
next operation works), PeerLostError if a rank died.

allreduce, allgather and broadcast can be differentiated: `sirtaki.torch.autograd` states how. The forms in
place and those that do not wait are not recorded for autograd.
"""

from __future__ import annotations

from torch import Tensor

from sirtaki._core.current import current
from sirtaki.common import ops
from sirtaki.common.handles import Handle, run, start
from sirtaki.common.ops import reduction
from sirtaki.torch import operations
from sirtaki.torch.autograd import AllGather, AllReduce, Broadcast, is_recorded
from sirtaki.torch.compression import Compression, Compressor
from sirtaki.torch.tensors import code_of


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combines a tensor over all ranks, element by element. All ranks must call it.

    Args:
        tensor: a dense CPU tensor of any shape, the same on every rank; int32, int64 or a floating dtype.
        average: the older way to say op=Average (True) or op=Sum (False).
        name: how the ranks recognise the operation.
        compression: Compression.fp16 or Compression.bf16 to exchange floating elements in 16 bits.
        op: Average (default), Sum, Min, Max or Product. An integer Average truncates toward zero.
        prescale_factor, postscale_factor: multiply before and after the combination.

    Returns:
        A new tensor of the same shape, order and dtype, the same on every rank.

    Raises:
        ValueError: op and average together, an unknown op, a tensor that cannot be reduced.
        MismatchError: ranks disagree about dtype, shape, op or factors.
        PeerLostError: a rank died.
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    if compression is not Compression.none:
        code_of(tensor, name)
    small, undo = compression.compress(tensor)
    if is_recorded(small):
        return compression.decompress(AllReduce.apply(small, current(), how, name), undo)
    return compression.decompress(run(current(), operations.allreduce(small, how, name)), undo)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """As `allreduce`, into the tensor itself, which is returned."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return run(current(), operations.allreduce_in_place(tensor, how, name))


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """As `allreduce`, without waiting: `synchronize(handle)` returns the tensor.

    Do not change `tensor` until then.
    """
    how = reduction(op, average, prescale_factor, postscale_factor)
    return start(current(), operations.allreduce(tensor, how, name))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """As `allreduce_`, without waiting. Neither read nor change `tensor` before `synchronize(handle)`."""
    how = reduction(op, average, prescale_factor, postscale_factor)
    return start(current(), operations.allreduce_in_place(tensor, how, name))


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Concatenates the ranks' tensors along dimension 0, in the order of ranks. All ranks must call it.

    Args:
        tensor: a dense CPU tensor of one dimension at least and of any dtype in the core's table.
            Dimension 0 may differ between ranks (and be 0), the others may not.
        name: how the ranks recognise the operation.

    Returns:
        A new tensor, the same on every rank.

    Raises:
        ValueError: a tensor without dimensions.
        MismatchError: ranks disagree about dtype or the other dimensions.
        PeerLostError: a rank died.
    """
    if is_recorded(tensor):
        return AllGather.apply(tensor, current(), name)
    return run(current(), operations.allgather(tensor, name))


def allgather_async(tensor: Tensor, name: str | None = None) -> Handle[Tensor]:
    """As `allgather`, without waiting: `synchronize(handle)` returns the tensor.

    Do not change `tensor` until then.
    """
    return start(current(), operations.allgather(tensor, name))


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Copies rank `root_rank`'s tensor to all ranks. All ranks must call it.

    Args:
        tensor: a dense CPU tensor of any dtype in the core's table, of one shape and dtype on all ranks.
        root_rank: whose tensor it is that all get.
        name: how the ranks recognise the operation.

    Returns:
        A new tensor with the root's values.

    Raises:
        ValueError: there is no rank `root_rank`.
        MismatchError: ranks disagree about dtype, shape or root.
        PeerLostError: a rank died.
    """
    if is_recorded(tensor):
        return Broadcast.apply(tensor, current(), root_rank, name)
    return run(current(), operations.broadcast(tensor, root_rank, name))


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """As `broadcast`, into the tensor itself, which is returned."""
    return run(current(), operations.broadcast_in_place(tensor, root_rank, name))


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle[Tensor]:
    """As `broadcast`, without waiting: `synchronize(handle)` returns the tensor.

    Do not change `tensor` until then.
    """
    return start(current(), operations.broadcast(tensor, root_rank, name))


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle[Tensor]:
    """As `broadcast_`, without waiting. Neither read nor change `tensor` before `synchronize(handle)`."""
    return start(current(), operations.broadcast_in_place(tensor, root_rank, name))


def barrier() -> None:
    """Returns once every rank has called it.

    Raises:
        PeerLostError: a rank died.
    """
    ops.barrier()
