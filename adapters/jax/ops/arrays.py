"""Converts JAX arrays to views of memory, and results to arrays: an `ArrayAdapter`, outside jit on CPUs.

An array's memory is read, and a result is taken over, without a copy: both are numpy arrays in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sirtaki.bindings.context import Context
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.handles import Streams
from sirtaki.common.ops.tensor import TensorView
from sirtaki.numpy import arrays
from sirtaki.numpy.arrays import address_of as address_of
from sirtaki.numpy.arrays import split_counts as split_counts

_ALIGNMENT = 64  # bytes, so that JAX takes the memory over without a copy

streams: Streams | None = None


def row_major_view(tensor: Any, name: str | None = None) -> TensorView:
    """Returns a view of an array in row-major order; waits for the array."""
    return arrays.row_major_view(np.asarray(tensor))


view = row_major_view  # JAX shows no other order to its users
reducible_view = row_major_view


def writable_view(tensor: Any, name: str | None = None, reduces: bool = False) -> TensorView:
    """Raises TypeError: arrays of JAX never change."""
    raise TypeError("arrays of JAX cannot be overwritten; use the result of the operation")


def empty_like(source: Any) -> tuple[Any, int]:
    """Returns memory for an array of the same shape, and its address."""
    return _empty(source.shape, source.dtype)


def empty_rows_like(source: Any, rows: int) -> tuple[Any, int]:
    """Returns memory for an array with `rows` rows like the source's, and its address."""
    return _empty((rows, *source.shape[1:]), source.dtype)


def _empty(shape: Sequence[int], dtype: Any) -> tuple[Any, int]:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -address_of(raw) % _ALIGNMENT
    memory = raw[start : start + size].view(dtype).reshape(shape)
    return memory, address_of(memory)


def wrapped(memory: Any) -> Any:
    """Returns memory that has been written as an array."""
    return jax.device_put(memory, may_alias=True)


def from_output(context: Context, batch: Batch, index: int) -> Any:
    """Returns the result that the core allocated for request `index`, as an array that owns it."""
    return wrapped(arrays.from_output(context, batch, index))


def written(tensor: Any, owner: Any) -> Any:
    """Returns the array: none is overwritten."""
    return tensor


def from_counts(counts: Sequence[int]) -> Any:
    """Returns numbers of rows as an int32 array."""
    return jax.numpy.asarray(arrays.from_counts(counts))


def is_plain(tensor: Any) -> bool:
    """Returns False: no array is overwritten."""
    return False
