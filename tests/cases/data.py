"""Values of each rank, and the collectives' expected results on them: exact, in plain numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import sirtaki.numpy as hvd

Array = NDArray[Any]

REDUCIBLE = {
    "uint8": np.uint8,
    "int8": np.int8,
    "uint16": np.uint16,
    "int16": np.int16,
    "uint32": np.uint32,
    "int32": np.int32,
    "uint64": np.uint64,
    "int64": np.int64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
FLOAT8 = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
COMPLEX = {"complex64": np.complex64, "complex128": np.complex128}
MOVABLE = REDUCIBLE | FLOAT8 | COMPLEX | {"bool": np.bool_}
OPS = {"Sum": hvd.Sum, "Average": hvd.Average, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}

# A scalar, zero elements, one, odd, empty with several dimensions, and more than one and two chunks of 256
# KiB.
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (65_539,), (131_077,)]


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns a rank's data: small integers, which every dtype holds exactly, different on every rank."""
    numbers = np.arange(int(np.prod(shape)), dtype=np.int64) * 7 + rank * 3
    small = (
        numbers % 2 if dtype is np.bool_ else numbers % 5 if np.dtype(dtype).kind == "u" else numbers % 5 - 2
    )
    return small.reshape(shape).astype(dtype)


def all_values(shape: tuple[int, ...], dtype: Any) -> list[Array]:
    """Returns the data of every rank."""
    return [values(rank, shape, dtype) for rank in range(hvd.size())]


def combined(arrays: list[Array], op: int) -> Array:
    """Returns an all-reduce's bit-exact result: in rank order, 16-bit floats in 32 bits."""
    dtype = arrays[0].dtype
    wide = _accumulator(dtype)
    result = arrays[0].astype(wide)
    steps = {hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}
    for array in arrays[1:]:
        result = np.asarray(steps.get(op, np.add)(result, array.astype(wide)))
    if op == hvd.Average:
        result = _divided(result, len(arrays))
    return np.asarray(result).astype(dtype)


def _accumulator(dtype: Any) -> Any:
    if dtype.kind in "iu" and dtype.itemsize <= 2:
        return np.dtype(np.int32)
    return dtype if dtype.kind in "iufc" and dtype.itemsize > 2 else np.dtype(np.float32)


def _divided(total: Array, count: int) -> Array:
    if total.dtype.kind in "iu":
        return np.sign(total) * (np.abs(total) // total.dtype.type(count))  # truncates toward zero
    return np.asarray(total / total.dtype.type(count))


def assert_same(actual: Array, expected: Array) -> None:
    """Compares shape, dtype and bits; any NaN equals any NaN."""
    assert actual.shape == expected.shape, f"shape {actual.shape} instead of {expected.shape}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype} instead of {expected.dtype}"
    np.testing.assert_array_equal(actual.astype(_plain(actual)), expected.astype(_plain(expected)))


def _plain(array: Array) -> Any:
    return array.dtype if array.dtype.kind in "biufc" else np.float32
