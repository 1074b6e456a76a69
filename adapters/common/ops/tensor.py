"""The core's description of a tensor, independent of its library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sirtaki.bindings.library import dtypes
from sirtaki.bindings.request import CPU

# Element types by name, with the core's codes. A framework's adapter maps its own dtypes to these.
DTYPE_CODES: dict[str, int] = {dtype.name: dtype.code for dtype in dtypes()}
REDUCIBLE: frozenset[int] = frozenset(dtype.code for dtype in dtypes() if dtype.reduce_ops)

ROW_MAJOR = 0


class TensorView(NamedTuple):
    """A tensor's memory.

    Attributes:
        pointer: address of the first element.
        shape: elements along each dimension; () for a scalar.
        dtype: the core's code of the element type.
        layout: ROW_MAJOR, or the number of another dense order (see `dense_layout`).
        owner: the object that keeps the memory alive.
        device: the location of the memory: CPU, or the number of a GPU.
    """

    pointer: int
    shape: Sequence[int]
    dtype: int
    layout: int
    owner: Any
    device: int = CPU


def dense_layout(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Returns the number of a dense stride order, equal on all ranks; None for memory with gaps or overlaps.

    Strides are counted in elements. Dimensions of one element have no position in an order and are ignored:
    row-major is 0, and a channels_last batch has the same number in numpy and in torch.
    """
    axes = [axis for axis, extent in enumerate(shape) if extent != 1]
    if 0 in shape:
        return ROW_MAJOR
    order = sorted(axes, key=lambda axis: -strides[axis])
    expected = 1
    for axis in reversed(order):
        if strides[axis] != expected:
            return None
        expected *= shape[axis]
    if order == axes:
        return ROW_MAJOR
    return sum(axis << (4 * place) for place, axis in enumerate(order))
