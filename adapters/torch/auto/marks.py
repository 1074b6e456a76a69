"""Tensors that are computed from the rows of a batch, and the scalars among them that Python reads.

A tensor computed from rows carries a mark. A scalar computed from such tensors by one call is a root: its
value over the whole batch follows from those of the ranks by a rule that the proof has found. A scalar that
is computed from roots alone is computed again from their values over the whole batch when it is read.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.user_code import is_internal, user_line
from sirtaki.torch.auto import positions, rules
from sirtaki.torch.auto.job import LoadedBatch, Root, job, refusal
from sirtaki.torch.auto.row_counts import RowCount
from sirtaki.torch.ops.nested import mapped, tensors_in

_MARK = "_sirtaki_mark"
_LARGEST_KEPT = 1024  # elements of an unmarked operand that is copied, to compute with it again
_READS = {
    "item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__",
    "__format__", "__repr__", "__contains__", "is_nonzero", "equal", "allclose", "__reduce_ex__",
}  # fmt: skip
_PICKS = {"__getitem__", "select", "unbind", "take", "gather", "index_select"}
_RAGGED = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "where_1"}


class Mark:
    """The mark of a tensor that depends on rows.

    Attributes:
        batch: the batch to which the rows belong.
        line: the user's code that has computed it.
        root: what it is, if it is a root.
        call: for what is computed from roots alone: a function of their values that returns its value.
        is_ragged: whether its number of rows depends on values.
        whole: for what the loader has delivered: all rows of it.
        version: the number of changes that `whole` had then.
        earlier: the line of this rank's rows of an earlier batch, if it mixes them with those of another.
    """

    __slots__ = ("batch", "call", "earlier", "is_ragged", "line", "root", "version", "whole")

    def __init__(self, batch: LoadedBatch, line: str) -> None:
        self.batch, self.line = batch, line
        self.root: Root | None = None
        self.call: Callable[[], Any] | None = None
        self.is_ragged = False
        self.whole: Tensor | None = None
        self.version = 0
        self.earlier: str | None = None

    @property
    def is_scalar(self) -> bool:
        return self.batch.is_open and (self.root is not None or self.call is not None)

    @property
    def is_delivered(self) -> bool:
        """Returns whether the rows are as the loader has delivered them."""
        return self.whole is not None and self.whole._version == self.version

    def value(self) -> Any:
        """Returns the value over the whole batch."""
        if self.root is not None:
            return rules.whole(self.batch, self.root)
        assert self.call is not None
        return self.call()

    def __reduce__(self) -> Any:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> Mark:
        return self


def mark_of(value: Any) -> Mark | None:
    """Returns the mark of a tensor; None if it is unmarked."""
    return getattr(value, _MARK, None) if isinstance(value, Tensor) else None


def put(tensor: Tensor, mark: Mark) -> None:
    """Marks a tensor."""
    setattr(tensor, _MARK, mark)


def unmark(tensor: Tensor) -> None:
    """Removes the mark of a tensor, if it has a mark."""
    if hasattr(tensor, _MARK):
        delattr(tensor, _MARK)


class Marking(TorchFunctionMode):
    """Marks results of calls with marked tensors; a scalar is read as its value over the whole batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        marks = [mark for mark in map(mark_of, tensors_in((args, kwargs))) if mark is not None]
        name = getattr(func, "__name__", "")
        if not marks:
            if name in _READS:
                _compare_read(args, sys._getframe(1))
            return func(*args, **kwargs)
        if name in ("size", "numel", "__get__"):
            return _metadata(func, name, args, kwargs, sys._getframe(1))
        if name in _READS:
            return _read(func, name, args, kwargs)
        return _called(func, name, args, kwargs, marks)


def _called(func: Any, name: str, args: Any, kwargs: Any, marks: list[Mark]) -> Any:
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    is_scalar = all(mark.is_scalar for mark in marks) and not _changes_many(is_in_place, args)
    again = _again(func, args, kwargs, is_in_place) if is_scalar else None
    result = func(*args, **kwargs)
    batch, earlier = _origin(marks)
    results = tensors_in(args[0] if name == "__setitem__" else result)
    for index, tensor in enumerate(results):
        mark = Mark(batch, user_line())
        mark.earlier = earlier
        if again is not None:
            path = None if isinstance(result, Tensor) else index
            mark.call = again if path is None else _item_of(again, path)
        elif batch.is_open and tensor.dim() == 0:
            from sirtaki.torch.auto.arguments import key_of

            key = key_of(batch, name, mark.line, args, kwargs)
            mark.root = Root(key, tensor.detach().clone(), tensor.requires_grad)
            batch.roots.append(mark.root)
            mark.root.is_row = name in _PICKS and _has_all_rows(args[0], batch)
        else:
            ragged = name in _RAGGED or (name == "__getitem__" and _has_mask(args[1]))
            mark.is_ragged = ragged or any(mark.is_ragged for mark in marks)
        setattr(tensor, _MARK, mark)
        if mark.is_scalar:
            batch.scalars.append((weakref.ref(tensor), mark))
    return result


def _origin(marks: list[Mark]) -> tuple[LoadedBatch, str | None]:
    """Returns the batch of a result, and the line of an operand if it adds rows of an earlier batch."""
    kept = next((mark for mark in marks if not mark.batch.is_open and mark.batch.is_part), None)
    earlier = next((mark.earlier for mark in marks if mark.earlier is not None), None)
    if kept is not None:
        is_mixed = any(mark.batch is not kept.batch for mark in marks)
        return kept.batch, earlier or (kept.line if is_mixed else None)
    # All ranks have the value of one process if an earlier batch was computed as a whole.
    return next((mark.batch for mark in marks if mark.batch.is_open), marks[0].batch), earlier


def _changes_many(is_in_place: bool, args: Any) -> bool:
    """Returns whether a call changes a tensor in place that is too large for a copy of its former value."""
    return is_in_place and isinstance(args[0], Tensor) and args[0].numel() > _LARGEST_KEPT


def _has_all_rows(tensor: Any, batch: LoadedBatch) -> bool:
    """Returns whether a tensor has an element for each of several rows."""
    return isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.size(0) == batch.count > 1


def _has_mask(index: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(index))


def _item_of(again: Callable[[], Any], index: int) -> Callable[[], Any]:
    return lambda: list(tensors_in(again()))[index]


def _again(func: Any, args: Any, kwargs: Any, is_in_place: bool) -> Callable[[], Any] | None:
    """Returns a function that computes a call with values over the whole batch; None: it cannot be kept."""
    if (
        sum(tensor.numel() for tensor in tensors_in((args, kwargs)) if mark_of(tensor) is None)
        > _LARGEST_KEPT
    ):
        return None
    kept, named = _kept(args), _kept(kwargs)

    def call() -> Any:
        with torch.no_grad():
            positional = _valued(kept)
            if is_in_place:
                positional = (positional[0].clone(), *positional[1:])
            result = func(*positional, **_valued(named))
            return positional[0] if func.__name__ == "__setitem__" else result

    return call


class _Kept:
    """An operand that is a number of rows or a marked tensor."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self.value = value


def _kept(value: Any) -> Any:
    def kept(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            mark = mark_of(leaf)
            return _Kept(mark.value) if mark is not None else leaf.detach().clone()
        return _Kept(lambda: leaf.total) if isinstance(leaf, RowCount) else leaf

    return mapped(value, kept)


def _valued(value: Any) -> Any:
    return mapped(value, lambda _, leaf: leaf.value() if isinstance(leaf, _Kept) else leaf)


# ---- Numbers of rows ---------------------------------------------------------------------------------------


def _metadata(func: Any, name: str, args: Any, kwargs: Any, caller: Any) -> Any:
    result = func(*args, **kwargs)
    tensor = args[0]
    if isinstance(result, Tensor):  # Tensor.data and the like
        mark = mark_of(tensor)
        if mark is not None and result is not tensor and mark_of(result) is None:
            _copy_mark(result, mark)
        return result
    if (
        not isinstance(result, int | torch.Size)
        or isinstance(result, bool)
        or not _counts_rows(tensor, caller)
    ):
        return result
    if isinstance(result, torch.Size):
        return _Shape((counted(tensor), *result[1:]))
    if name == "numel":
        rows: Any = counted(tensor)
        return rows * (result // max(len(tensor), 1))
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return counted(tensor) if axis in (0, -tensor.dim()) else result


class _Shape(tuple):
    """A shape with a first element that counts rows."""

    def numel(self) -> Any:
        result: Any = 1
        for value in self:
            result = result * value
        return result


def _copy_mark(tensor: Tensor, mark: Mark) -> None:
    setattr(tensor, _MARK, mark)
    if mark.is_scalar:
        mark.batch.scalars.append((weakref.ref(tensor), mark))


def _counts_rows(tensor: Any, caller: Any) -> bool:
    """Returns whether a number counts this rank's rows, and the code that reads it counts batches."""
    mark = mark_of(tensor)
    if mark is None or not mark.batch.is_part or not tensor.dim():
        return False
    if is_internal(caller.f_code.co_filename) or positions.is_inside_module(caller):
        return False
    if mark.is_ragged:
        raise refusal(
            f"{user_line()}: this number of rows depends on the values of this rank's part of the "
            f"batch (selected at {mark.line}); count with a sum over a mask: (predictions == targets).sum()"
        )
    return tensor.size(0) == mark.batch.count


def counted(tensor: Tensor) -> RowCount:
    """Returns the number of rows of a tensor that has a row for each row of the batch."""
    mark = mark_of(tensor)
    assert mark is not None
    batch = mark.batch
    return RowCount(batch.count, batch.share.total, lambda: batch.is_open)


def length(value: Any) -> Any:
    """Returns `len(value)`, as the module of a training loop sees it."""
    if isinstance(value, Tensor) and _counts_rows(value, sys._getframe(1)):
        return counted(value)
    return len(value)


def with_count(function: Callable[[Any, Any], Any], count: RowCount, tensor: Tensor) -> Any:
    """Returns a function of a number of rows and a tensor; read later, with the number of the whole batch."""
    mark = mark_of(tensor)
    result = function(count.__index__(), tensor)
    if mark is not None and mark.is_scalar and isinstance(result, Tensor):
        value = _kept(tensor)
        new = Mark(mark.batch, user_line())
        new.call = lambda: function(count.total, _valued(value))
        _copy_mark(result, new)
    return result


# ---- Reading -----------------------------------------------------------------------------------------------


def _read(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    from sirtaki.torch.auto.loaders import end_closed_batch

    end_closed_batch()
    marked = [tensor for tensor in tensors_in((args, kwargs)) if mark_of(tensor) is not None]
    for tensor in marked:
        mark = mark_of(tensor)
        if mark is not None and not mark.is_scalar and not mark.is_delivered:
            raise refusal(
                f"{user_line()}: {name} reads a tensor that each rank has computed from its rows of a "
                f"batch only (at {mark.line}), and its value over the whole batch is not known. Scalars can "
                "be read: sums, means and losses, in the step that computes them; or use @hvd.consistent "
                "with out="
            )
    wholes = {id(tensor): _whole(tensor) for tensor in marked}
    if name == "__repr__" and wholes and marked[0].dim() == 0:  # shows how the tensor was computed
        own = [(tensor, tensor.detach().clone()) for tensor in marked]
        try:
            for tensor in marked:
                write(tensor, wholes[id(tensor)])
            return func(*args, **kwargs)
        finally:
            for tensor, value in own:
                write(tensor, value)
    return func(*_replaced(args, wholes), **_replaced(kwargs, wholes))


def _compare_read(args: Any, caller: Any) -> None:
    """Compares a scalar that is read and has no mark, in a proof: code that hides its operands makes such."""
    link = job.batch.link if job.batch is not None else None
    if link is None or positions.is_inside_sirtaki(caller):
        return
    for tensor in tensors_in(args):
        if tensor.numel() == 1 and not tensor.is_complex():
            link.check(user_line(), tensor)


def _replaced(value: Any, wholes: dict[int, Tensor]) -> Any:
    return mapped(value, lambda _, leaf: wholes.get(id(leaf), leaf))


def _whole(tensor: Tensor) -> Tensor:
    """Returns a scalar with its value over the whole batch, or all rows of what the loader has delivered."""
    mark = mark_of(tensor)
    assert mark is not None
    if mark.whole is not None:
        return mark.whole
    batch, result = mark.batch, tensor.detach().clone()
    if batch.link is not None:
        write(result, batch.link.value(mark.line, tensor))
    elif batch.is_part:
        write(result, mark.value())
    unmark(result)
    return result


def write(tensor: Tensor, value: Any) -> None:
    """Changes a tensor's value behind autograd's back: what differentiates it does not need the value."""
    with torch.no_grad():
        tensor.data.copy_(torch.as_tensor(value, dtype=tensor.dtype))


def settle(batch: LoadedBatch) -> None:
    """Gives the scalars of a batch that is about to end their values over the whole batch."""
    rules.gather(batch)
    alive = [(tensor, mark) for reference, mark in batch.scalars if (tensor := reference()) is not None]
    values = [(tensor, _value_if_known(mark) if batch.is_part else tensor) for tensor, mark in alive]
    for (tensor, mark), (_, value) in zip(alive, values, strict=True):
        if mark_of(tensor) is mark and value is not None:
            if value is not tensor:
                write(tensor, value)
            unmark(tensor)
    batch.scalars.clear()


def _value_if_known(mark: Mark) -> Any:
    try:
        return mark.value()
    except UnsupportedError:  # raised where the tensor is read
        return None
