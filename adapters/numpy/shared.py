"""Arrays in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from sirtaki.common.ops.shared_arrays import memory_of
from sirtaki.numpy.arrays import Array

__all__ = ["empty"]


def empty(shape: int | Sequence[int], dtype: DTypeLike = np.float64) -> Array:
    """Returns a new array of zeros that an in-place all-reduce need not copy; any rank may call it alone.

    If all ranks of a host pass such arrays, or parts of them, to `allreduce_` or one of its forms, the ranks
    read and write each other's arrays where they are, with the same result as otherwise:
    docs/reference/shared_memory.md. Everything else treats it as any other array. Where ranks share no
    memory, it is in this rank's own.

    Raises:
        OutOfMemoryError: there is not enough memory, or this rank's share of it is in use.
        NotInitializedError: init() has not been called.
    """
    kind = np.dtype(dtype)
    extents, memory = memory_of(shape, kind.itemsize)
    return np.zeros(extents, kind) if memory is None else np.frombuffer(memory, kind).reshape(extents)
