"""Converts numpy arrays to views of memory, and results to arrays: an `ArrayAdapter`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.library import ffi
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.handles import Streams
from sirtaki.common.ops.tensor import DTYPE_CODES, ROW_MAJOR, TensorView, dense_layout

Array = NDArray[Any]

streams: Streams | None = None
_ADDRESS = ffi.typeof("uintptr_t")


def _dtypes() -> dict[str, np.dtype[Any]]:
    found = {name: np.dtype(name) for name in DTYPE_CODES if name in np.sctypeDict}
    try:
        extra = importlib.import_module("ml_dtypes")  # adds bfloat16 and the float8 types to numpy
    except ImportError:
        return found
    return found | {name: np.dtype(getattr(extra, name)) for name in DTYPE_CODES if hasattr(extra, name)}


_BY_NAME = _dtypes()
_CODES = {dtype: DTYPE_CODES[name] for name, dtype in _BY_NAME.items()}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def _code(array: Array) -> int:
    try:
        return _CODES[array.dtype]
    except KeyError:
        raise UnsupportedError(
            f"arrays of dtype {array.dtype} cannot be exchanged; "
            f"convert with astype() to one of {', '.join(_BY_NAME)}"
        ) from None


def address_of(array: Array) -> int:
    """Returns the address of an array's first element."""
    try:
        return int(ffi.cast(_ADDRESS, ffi.from_buffer(array)))
    except (TypeError, ValueError, BufferError):
        return array.ctypes.data  # three times slower, but supports every array


def is_plain(tensor: Any) -> bool:
    """Returns whether an object is a row-major array that can be written in place."""
    return type(tensor) is np.ndarray and tensor.flags.carray


def view(tensor: ArrayLike, name: str | None = None) -> TensorView:
    """Returns a view of any array-like; its owner is the array. Copies an array that is not dense."""
    array = tensor if type(tensor) is np.ndarray else np.asarray(tensor)
    code = _code(array)
    layout: int | None = ROW_MAJOR
    if not array.flags.c_contiguous:
        layout = dense_layout(array.shape, [stride // array.itemsize for stride in array.strides])
        if layout is None:
            array, layout = array.copy(order="C"), ROW_MAJOR
    return TensorView(address_of(array), array.shape, code, layout or ROW_MAJOR, array)


reducible_view = view  # the core rejects dtypes that it cannot combine


def row_major_view(tensor: ArrayLike, name: str | None = None) -> TensorView:
    """Returns a view of an array in row-major order; copies the array if it is not."""
    array = np.asarray(tensor, order="C")
    return TensorView(address_of(array), array.shape, _code(array), ROW_MAJOR, array)


def writable_view(tensor: Array, name: str | None = None, reduces: bool = False) -> TensorView:
    """Returns a view of an array to overwrite; the view's owner is another array if it is not dense.

    Raises:
        TypeError: not a numpy array.
        ValueError: a read-only array.
    """
    if not isinstance(tensor, np.ndarray):
        raise TypeError(f"an operation in place takes a numpy array, not {type(tensor).__name__}")
    if not tensor.flags.writeable:
        raise ValueError("the array is read-only, so no result can be written to it; pass a copy")
    return view(tensor)


def empty_like(source: Array) -> tuple[Array, int]:
    """Returns a new array of the same shape and order, and its address."""
    result = np.empty_like(source)
    return result, address_of(result)


def empty_rows_like(source: Array, rows: int) -> tuple[Array, int]:
    """Returns a new array with `rows` rows like the source's, and its address."""
    result = np.empty((rows, *source.shape[1:]), source.dtype)
    return result, address_of(result)


def wrapped(memory: Array) -> Array:
    """Returns the array itself."""
    return memory


def from_output(context: Context, batch: Batch, index: int) -> Array:
    """Returns the result that the core allocated for request `index`, as an array that owns it."""
    output = context.output(batch, index)
    dtype = _DTYPES[output.dtype]
    if not output.buffer:
        return np.empty(output.shape, dtype)
    return np.frombuffer(output.buffer, dtype).reshape(output.shape)


def written(tensor: Array, owner: Array) -> Array:
    """Copies a result back to an array that is not dense; returns the array."""
    if owner is not tensor:
        tensor[...] = owner
    return tensor


def split_counts(splits: ArrayLike | None) -> list[int] | None:
    """Returns the splits of an all-to-all as numbers."""
    return None if splits is None else [int(split) for split in np.asarray(splits)]


def from_counts(counts: Sequence[int]) -> Array:
    """Returns numbers of rows as an int32 array."""
    return np.array(counts, dtype=np.int32)


# ---- Arrays in memory that the ranks of a host share ---------------------------------------------------


def empty(shape: int | Sequence[int], dtype: DTypeLike = np.float64) -> Array:
    """Returns a new array of zeros that an in-place all-reduce need not copy; any rank may call it alone.

    If all ranks of a host pass such arrays, or parts of them, to `allreduce_` or one of its forms, the ranks
    read and write each other's arrays where they are, with the same result as otherwise:
    docs/reference/shared_memory.md. Everything else treats it as any other array. Where ranks share no
    memory, it is in this rank's own.

    Raises:
        OutOfMemoryError: there is not enough memory, or this rank's share of it is in use.
        NotInitializedError: init() has not been called.

    Example:
        gradients = hvd.empty((1024, 256), np.float32)
        gradients[...] = hvd.rank()
        hvd.allreduce_(gradients)  # 0.5 everywhere on 2 ranks
    """
    from sirtaki.bindings.shared_memory import memory_of  # imported late: few programs need it

    kind = np.dtype(dtype)
    extents, memory = memory_of(shape, kind.itemsize)
    return np.zeros(extents, kind) if memory is None else np.frombuffer(memory, kind).reshape(extents)
