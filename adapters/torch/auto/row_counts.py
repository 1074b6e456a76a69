"""The number of rows of a tensor, as the script reads it while a batch is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from sirtaki.torch.auto.job import LoadedBatch
from sirtaki.torch.ops.nested import leaves_in, mapped


class RowCount(int):
    """A number of rows: of the whole batch, and beside it of this rank's part, for tensors of the part.

    `x.view(x.size(0), -1)` needs the rows that are here, and `total += loss.item() * x.size(0)` those of
    the batch. Sums and products with integers keep both numbers, until the batch has ended.

    Attributes:
        part: the number for tensors of this rank's part.
        batch: the batch that has the rows.
    """

    part: int
    batch: LoadedBatch

    def __new__(cls, part: int, total: int, batch: LoadedBatch) -> RowCount:
        count = super().__new__(cls, total)
        count.part, count.batch = part, batch
        return count

    @property
    def here(self) -> int:
        """Returns the number for the tensors that this process computes."""
        return self.part if self.batch.is_open and self.batch.is_part else int(self)

    def __reduce__(self) -> Any:
        return int, (int(self),)


class RowShape(tuple):
    """The shape of a tensor, with numbers of rows in it."""

    def numel(self) -> Any:
        """Returns the number of elements."""
        result: Any = 1
        for value in self:
            result = result * value
        return result

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return RowShape(found) if isinstance(index, slice) else found


def counts_in(value: Any) -> Iterator[RowCount]:
    """Yields the numbers of rows in nested arguments of a call."""
    for leaf in leaves_in(value):
        if isinstance(leaf, RowCount):
            yield leaf
        elif isinstance(leaf, slice):
            yield from counts_in((leaf.start, leaf.stop, leaf.step))


def with_numbers(leaf: Any, number: Callable[[RowCount], Any]) -> Any:
    """Returns an argument of a call with plain numbers in place of the numbers of rows."""
    if isinstance(leaf, RowCount):
        return number(leaf)
    if isinstance(leaf, RowShape):
        return torch.Size(with_numbers(item, number) for item in leaf)
    if isinstance(leaf, slice):
        return slice(*(with_numbers(item, number) for item in (leaf.start, leaf.stop, leaf.step)))
    return leaf


def numbered(value: Any, number: Callable[[RowCount], Any]) -> Any:
    """Returns nested arguments of a call with plain numbers in place of the numbers of rows."""
    return mapped(value, lambda _, leaf: with_numbers(leaf, number))


def _operation(name: str) -> Callable[[RowCount, Any], Any]:
    plain = getattr(int, name)

    def method(self: RowCount, other: Any) -> Any:
        total = plain(int(self), other)
        # `seen += rows` is a count of rows, which Python keeps.
        if total is NotImplemented or name == "__radd__" or not self.batch.is_open:
            return total
        return RowCount(plain(self.part, getattr(other, "part", other)), total, self.batch)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _prefix in ("", "r"):
        setattr(RowCount, f"__{_prefix}{_name}__", _operation(f"__{_prefix}{_name}__"))
