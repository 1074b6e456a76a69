"""The parts of a batch: its tensors split along their first axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError

_PLAIN = (str, bytes, int, float, complex, type(None), np.generic)


def arrays_of(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yields the tensors and arrays of a batch with at least one axis, and how code reaches them."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim:
            yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from arrays_of(one, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            yield from arrays_of(one, f"{path}[{index}]")


def rows_of(batch: Any, place: str) -> int:
    """Returns the number of rows of a batch.

    Raises:
        UnsupportedError: it has no tensor, or tensors that disagree.
    """
    found = list(arrays_of(batch))
    if not found:
        raise UnsupportedError(
            f"{place}: this loader's batches hold no tensor with an axis of rows, so they cannot be split "
            "over the ranks; let collate_fn return tensors whose first axis is that of the rows"
        )
    rows = len(found[0][1])
    for path, one in found[1:]:
        if len(one) != rows:
            raise UnsupportedError(
                f"{place}: {found[0][0]} has shape {list(found[0][1].shape)} and {path} has shape "
                f"{list(one.shape)}: the ranks split a batch along the first axis of all its tensors, so let "
                "the first axis be that of the rows (batch first), and pad rows of several lengths instead "
                "of joining them"
            )
    return rows


def part_of(value: Any, rows: int, part: slice, mark: Callable[[Tensor, Tensor], None], place: str) -> Any:
    """Returns some rows of a batch of so many rows, in the structure of the batch."""

    def cut(one: Any) -> Any:
        return part_of(one, rows, part, mark, place)

    if isinstance(value, Tensor | np.ndarray):
        if not value.ndim:
            return value
        mine = value[part]
        if isinstance(mine, Tensor) and isinstance(value, Tensor):
            mark(mine, value)
        return mine
    if type(value) is dict:
        return {key: cut(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        if not any(True for _ in arrays_of(value)) and len(value) == rows:
            return value[part]
        cuts = [cut(one) for one in value]
        return type(value)(*cuts) if hasattr(value, "_fields") else type(value)(cuts)
    if isinstance(value, _PLAIN):
        return value
    raise UnsupportedError(
        f"{place}: this loader's batches hold a {type(value).__name__}, of which it is not known how it is "
        "split over the ranks; let collate_fn return tensors in tuples, lists or dictionaries"
    )
