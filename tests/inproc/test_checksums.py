"""Checksums distinguish tensors that have the same bytes."""

from __future__ import annotations

import numpy as np

from sirtaki.common.ops.tensor import DTYPE_CODES, ROW_MAJOR, TensorView
from sirtaki.common.training.consistency import checksum


def of(array: np.ndarray) -> int:
    code = DTYPE_CODES[array.dtype.name]
    return checksum(TensorView(array.ctypes.data, array.shape, code, ROW_MAJOR, array))


def test_a_checksum_is_that_of_dtype_shape_and_bytes() -> None:
    zeros = [
        np.zeros(shape, dtype)
        for dtype in (np.float32, np.int32, np.float64)
        for shape in ((2, 3), (3, 2), (6,), (0,), (0, 3))
    ]
    one_bit = np.zeros(6, np.float32)
    one_bit.view(np.uint8)[-1] = 1
    arrays = [*zeros, one_bit]
    assert len({of(array) for array in arrays}) == len(arrays)
    assert [of(array) for array in arrays] == [of(array.copy()) for array in arrays]
