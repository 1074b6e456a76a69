"""The number of rows of a tensor, as the code of a loop reads it while a batch is split."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor


class RowCount:
    """A number of rows: of this rank's part for tensors and indices, of the whole batch for all other uses.

    `x.view(x.size(0), -1)` needs the rows that are here, and `total += loss.item() * x.size(0)` those of
    the batch. Sums and products with integers keep both numbers, until the batch has ended.

    Attributes:
        part: the number for tensors.
        total: the number for Python.
    """

    __array_ufunc__ = None  # NumPy's numbers leave the operation to this class
    __slots__ = ("_is_current", "part", "total")

    def __init__(self, part: int, total: int, is_current: Callable[[], bool]) -> None:
        self.part, self.total, self._is_current = part, total, is_current

    def __index__(self) -> int:
        return self.part if self._is_current() else self.total

    def __int__(self) -> int:
        return self.total

    def __float__(self) -> float:
        return float(self.total)

    def __bool__(self) -> bool:
        return bool(self.total)

    def __hash__(self) -> int:
        return hash(self.total)

    def __repr__(self) -> str:
        return repr(self.total)

    def __format__(self, spec: str) -> str:
        return format(self.total, spec)

    def __round__(self, digits: int | None = None) -> int:
        return round(self.total, digits) if digits is not None else self.total

    def __reduce__(self) -> Any:
        return int, (self.total,)


def counting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of torch that takes numbers of rows where it takes nothing but numbers."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        numbers = [
            operator.index(argument) if isinstance(argument, RowCount) else argument for argument in args
        ]
        named = {
            key: operator.index(value) if isinstance(value, RowCount) else value
            for key, value in kwargs.items()
        }
        return function(*numbers, **named)

    return call


def _operation(function: Callable[[Any, Any], Any], is_reflected: bool, keeps_both: bool) -> Any:
    def apply(first: Any, second: Any) -> Any:
        return function(second, first) if is_reflected else function(first, second)

    def method(self: RowCount, other: Any) -> Any:
        if isinstance(other, Tensor):
            from sirtaki.torch.auto.marks import with_count

            return with_count(apply, self, other)
        number = other.total if isinstance(other, RowCount) else other
        total = apply(self.total, number)
        # `seen += rows` is a count of rows, which Python keeps.
        is_counting = is_reflected and function is operator.add
        is_whole = isinstance(other, int | RowCount) and type(total) is int and not is_counting
        if not keeps_both or not is_whole or not self._is_current():
            return total
        return RowCount(apply(self.part, operator.index(other)), total, self._is_current)

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    for _prefix in ("", "r"):
        _function = getattr(operator, _name)
        _both = _name not in ("truediv", "pow")
        setattr(RowCount, f"__{_prefix}{_name}__", _operation(_function, bool(_prefix), _both))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(RowCount, f"__{_name}__", _operation(getattr(operator, _name), False, False))
