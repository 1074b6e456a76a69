"""Tensors of torch.distributed's calls, as rows of memory that the core reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from sirtaki.common.ops.tensor import TensorView
from sirtaki.torch.ops.tensors import count_write, refuse_overlap, view

Given = TypeVar("Given")


def single(tensors: Sequence[Given], what: str) -> Given:
    """Returns the only element of a list: this rank's tensor, or its list of tensors."""
    if isinstance(tensors, Tensor):
        raise TypeError(f"{what} takes a list with one tensor, not a tensor")
    if len(tensors) != 1:
        raise ValueError(f"{what} has {len(tensors)} entries, but a rank passes exactly one")
    return tensors[0]


def whole(tensor: Tensor) -> TensorView:
    """Returns a view of a tensor that is exchanged as it is, in any dense order."""
    return view(tensor.detach())


def rows(tensor: Tensor, count: int) -> TensorView:
    """Returns a view of a tensor's elements in `count` rows; the owner is a copy if it is not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if flat.numel() % max(count, 1):
        raise ValueError(f"a tensor of {flat.numel()} elements cannot be divided evenly among {count} ranks")
    return view(flat.view(count, flat.numel() // max(count, 1)))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the concatenated elements of several tensors, detached, in a single dimension."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def require_equal(tensors: Sequence[Tensor], like: Tensor, count: int, what: str) -> None:
    """Raises ValueError unless there are `count` tensors with the dtype and number of elements of another."""
    if len(tensors) != count:
        raise ValueError(f"{what} has {len(tensors)} tensors, but the group has {count} ranks")
    for rank, tensor in enumerate(tensors):
        require_elements(tensor, like.numel(), like, f"{what}[{rank}]")


def require_elements(tensor: Tensor, count: int, like: Tensor, what: str) -> None:
    """Raises ValueError unless a tensor has `count` elements, with the dtype and on the device of another."""
    if tensor.device != like.device:
        raise ValueError(f"{what} is on {tensor.device}, but this rank's other tensor on {like.device}")
    if tensor.dtype != like.dtype:
        raise ValueError(
            f"{what} has the dtype {tensor.dtype}, but this rank's other tensor has {like.dtype}"
        )
    if tensor.numel() != count:
        raise ValueError(f"{what} has {tensor.numel()} elements instead of {count}")


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two contiguous tensors overlap."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return begin < other.data_ptr() + other.numel() * other.element_size() and other.data_ptr() < end


def written(tensor: Tensor, owner: Tensor) -> None:
    """Ends a write to a tensor: `owner` is the memory that was written, the tensor's own or another's."""
    if owner.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        assign(tensor, owner)
    elif not tensor.is_inference():  # these do not count writes
        count_write([tensor])


def assign(tensor: Tensor, values: Tensor) -> None:
    """Copies values to a tensor of as many elements, in row-major order."""
    refuse_overlap(tensor)
    with _writing(tensor):
        tensor.copy_(values.reshape(tensor.shape))


def _writing(tensor: Tensor) -> AbstractContextManager[object]:
    # Tensors of inference mode can be written to in this mode only, and the mode belongs to a thread.
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()
