"""Tensors in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sirtaki.common.shared_arrays import memory_of

__all__ = ["empty"]


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Returns a new tensor of zeros whose all-reduce in place needs no copies; any rank may call it alone.

    If all ranks of a host pass such tensors, or contiguous parts of them, to `allreduce_` or one of its
    forms, the ranks read and write each other's tensors where they are, with the same result as otherwise:
    docs/shared_memory.md. Everything else treats it as any other tensor on the CPU. Where ranks share no
    memory, it is in this rank's own.

    Raises:
        OutOfMemoryError: there is not enough memory, or this rank's share of it is in use.
        NotInitializedError: init() has not been called.
    """
    kind = torch.get_default_dtype() if dtype is None else dtype
    extents, memory = memory_of(shape, kind.itemsize)
    if not memory:  # frombuffer() refuses empty memory
        return torch.zeros(extents, dtype=kind)
    return torch.frombuffer(memory, dtype=kind).view(extents)
