"""The core's description of a tensor, independent of its library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sirtaki.bindings.context import Context
from sirtaki.bindings.library import dtypes
from sirtaki.bindings.request import CPU, Batch
from sirtaki.common.ops.handles import Streams

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


# ---- The interface between the collectives and the arrays of a library ---------------------------------


class ArrayAdapter(Protocol):
    """The functions that a library's adapter provides, usually as a module: `sirtaki.numpy.arrays`.

    The `name` of an array is that of its operation, for messages; None if it has none.
    """

    @property
    def streams(self) -> Streams | None:
        """Returns the library's streams; None if its arrays are never on a GPU."""
        ...

    def view(self, tensor: Any, name: str | None = None, /) -> TensorView:
        """Returns a view of an array in any dense order; copies an array that is not dense."""
        ...

    def reducible_view(self, tensor: Any, name: str | None = None, /) -> TensorView:
        """Works like `view`, for an array that is combined; may reject dtypes that cannot be."""
        ...

    def row_major_view(self, tensor: Any, name: str | None = None, /) -> TensorView:
        """Returns a view of an array in row-major order; copies the array if it is not."""
        ...

    def writable_view(self, tensor: Any, name: str | None = None, reduces: bool = False, /) -> TensorView:
        """Returns a view of an array to overwrite: `view`, or `reducible_view` if it is combined.

        The owner is another array if this one is not dense. Rejects arrays that cannot be overwritten.
        """
        ...

    def empty_like(self, source: Any, /) -> tuple[Any, int]:
        """Returns memory for an array of the same shape, order and dtype, and its address."""
        ...

    def empty_rows_like(self, source: Any, rows: int, /) -> tuple[Any, int]:
        """Returns memory for an array with `rows` rows like the source's, and its address."""
        ...

    def wrapped(self, memory: Any, /) -> Any:
        """Returns such memory, once it has been written, as an array."""
        ...

    def from_output(self, context: Context, batch: Batch, index: int, /) -> Any:
        """Returns the result that the core allocated for request `index`, as an array that owns it."""
        ...

    def written(self, tensor: Any, owner: Any, /) -> Any:
        """Ends a write to an array, by way of a writable view's owner; returns the array."""
        ...

    def split_counts(self, splits: Any, /) -> list[int] | None:
        """Returns the splits of an all-to-all as numbers. Raises ValueError if they are not numbers."""
        ...

    def from_counts(self, counts: Sequence[int], /) -> Any:
        """Returns the numbers of rows that an all-to-all has received, as an int32 array."""
        ...

    def is_plain(self, tensor: Any, /) -> bool:
        """Returns whether an array can be overwritten where it is, in row-major order in CPU memory."""
        ...

    def address_of(self, tensor: Any, /) -> int:
        """Returns the address of an array's first element."""
        ...
