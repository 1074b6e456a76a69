"""A library's arrays in nested structures: the interface, and the texts that describe leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

PLAIN = (str, bytes, bool, int, float, complex, type(None))  # values that their `repr` describes fully

Path = tuple[Any, ...]
Leaves = tuple[Sequence[tuple[Path, Any]], Callable[[Sequence[Any]], Any]]


class Library(Protocol):
    """The functions that an adapter provides, as a module: `sirtaki.torch.one_batch`."""

    def flatten(self, tree: Any) -> Leaves:
        """Returns the leaves of nested values by path, and a function that rebuilds them from new leaves."""
        ...

    def text(self, path: Path) -> str:
        """Returns a path as a program writes it: "['loss'][0]"."""
        ...

    def is_array(self, leaf: Any) -> bool:
        """Returns whether a leaf is an array: of the library, or of numpy."""
        ...

    def is_floating(self, array: Any) -> bool:
        """Returns whether an array has floating or complex elements."""
        ...

    def checksum(self, array: Any) -> int:
        """Returns the checksum of an array, which is read as a whole."""
        ...

    def without_gradient(self, array: Any) -> Any:
        """Returns an array that a caller may keep."""
        ...

    def summed(self, arrays: Sequence[Any], factors: Sequence[float], name: str) -> Sequence[Any]:
        """Returns the sums over all ranks of arrays times this rank's factors; with 0, whatever they hold."""
        ...

    def gathered(self, arrays: Sequence[Any], name: str) -> Sequence[Any]:
        """Returns the rows of all ranks, in their order."""
        ...


def kind_of(array: Any) -> str:
    """Describes an array's dtype and shape."""
    return f"{dtype_of(array)} of shape {list(array.shape)}"


def dtype_of(array: Any) -> str:
    """Returns the name of an array's dtype."""
    return str(array.dtype).removeprefix("torch.")
