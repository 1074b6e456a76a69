"""Tensors that are computed from the rows of a batch, and the scalars among them that Python reads.

A tensor computed from rows carries a mark. A scalar computed from such tensors by one call is a root, and so
are small sums and means over the rows: their values over the whole batch follow from those of the ranks by a
rule that the proof has found. What is computed from roots alone is computed again from their values over the
whole batch when it is read. In a proof, the mark of a tensor of the whole batch holds the tensor of this
rank's rows.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.user_code import is_internal, user_line
from sirtaki.torch._private import without_functions
from sirtaki.torch.auto import rules
from sirtaki.torch.auto.job import Key, LoadedBatch, Root, Site, job, refusal
from sirtaki.torch.auto.row_counts import RowCount, RowShape, counts_in, numbered, with_numbers
from sirtaki.torch.ops.nested import mapped, tensors_in

if TYPE_CHECKING:
    from sirtaki.torch.auto.proof import Twin

_MARK = "_sirtaki_mark"
_WITHOUT_ROWS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size}
_NUMBERS = {"size", "numel", "nelement", "__get__"}
_READS = {
    "item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__",
    "__format__", "__repr__", "__contains__", "is_nonzero", "equal", "allclose", "__reduce_ex__",
}  # fmt: skip
_PICKS = {"__getitem__", "select", "unbind", "take", "gather", "index_select"}
# Calls of losses with a gradient that is linear in theirs.
_SUMS = {
    "add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "sub_", "__isub__", "rsub",
    "__rsub__", "neg", "__neg__", "sum", "mean", "stack", "clone", "to", "double", "float", "reshape", "view",
    "squeeze",
}  # fmt: skip
_SCALES = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "div", "__truediv__", "div_", "__itruediv__"}
# Calls that can make small tensors without rows: of sums and means over rows. Some add to a tensor.
_ADDITIONS = {"index_add_", "index_put_", "scatter_add_"}
_REDUCTIONS = {name for name, rule in rules.BY_NAME.items() if rule in ("sum", "mean")}
_RAGGED = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "where_1"}


class Mark:
    """The mark of a tensor that depends on rows.

    Attributes:
        batch: the batch to which the rows belong.
        line: the user's code that has computed it.
        root: what it is, if it is a root.
        call: a function that returns the value of what is computed from roots alone, or of a tensor to which
            a root was added.
        part: in a proof, the tensor of this rank's rows; None if it is unknown.
        is_ragged: whether its number of rows depends on values.
        whole: for what the loader has delivered: all rows of it.
        version: the number of changes that `whole` had then.
        earlier: the line of this rank's rows of an earlier batch, if it mixes them with those of another.
    """

    __slots__ = ("batch", "call", "earlier", "is_ragged", "line", "part", "root", "version", "whole")

    def __init__(self, batch: LoadedBatch, line: str) -> None:
        self.batch, self.line = batch, line
        self.root: Root | None = None
        self.call: Callable[[], Any] | None = None
        self.part: Tensor | None = None
        self.is_ragged = False
        self.whole: Tensor | None = None
        self.version = 0
        self.earlier: str | None = None

    @property
    def has_value(self) -> bool:
        """Returns whether its value over the whole batch may follow from the ranks' roots."""
        return self.batch.is_open and (self.root is not None or self.call is not None)

    @property
    def is_delivered(self) -> bool:
        """Returns whether the rows are as the loader has delivered them."""
        return self.whole is not None and self.whole._version == self.version

    def value(self) -> Any:
        """Returns the value over the whole batch."""
        if self.call is not None:
            return self.call()
        assert self.root is not None
        return rules.whole(self.batch, self.root)

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
    if mark.batch.proof is not None:
        mark.batch.proof.watch(tensor)
    if mark.has_value:
        mark.batch.scalars.append((weakref.ref(tensor), mark))


def unmark(tensor: Tensor) -> None:
    """Removes the mark of a tensor, if it has a mark."""
    if hasattr(tensor, _MARK):
        delattr(tensor, _MARK)


class Marking(TorchFunctionMode):
    """Follows calls with marked tensors and numbers of rows.

    The mode sees every call of torch in the script, as the tensors of a batch reach all of its code.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        rows = _rows_in((args, kwargs))
        if name == "backward" or rows is None or (rows is RowCount and job.batch is None):
            return func(*args, **kwargs)
        is_marked = rows is Mark
        proof = job.batch.proof if job.batch is not None else None
        if proof is None:
            return _handled(func, name, args, kwargs, is_marked)
        with proof.following():
            return _handled(func, name, args, kwargs, is_marked)


def _handled(func: Any, name: str, args: Any, kwargs: Any, is_marked: bool) -> Any:
    if is_marked and name in _NUMBERS:
        return _metadata(func, name, args, kwargs)
    if is_marked and name in _READS:
        return _read(func, name, args, kwargs)
    if name == "__set__" and mark_of(args[0]) is None:  # such as `parameter.grad`, of which there is one
        return func(*args, **kwargs)
    return follow(func, name, args, kwargs)


def _rows_in(values: Iterable[Any]) -> type[Mark] | type[RowCount] | None:
    """Returns Mark if there is a marked tensor in nested arguments; else RowCount if there is such a number.

    Each call of torch is looked at, so this is one pass.
    """
    found: type[Mark] | type[RowCount] | None = None
    for value in values:
        inner: type[Mark] | type[RowCount] | None = None
        kind = type(value)
        if kind in _WITHOUT_ROWS:
            continue
        if isinstance(value, Tensor):
            inner = Mark if getattr(value, _MARK, None) is not None else None
        elif kind is RowCount:
            inner = RowCount
        elif isinstance(value, list | tuple):
            inner = _rows_in(value)
        elif isinstance(value, dict):
            inner = _rows_in(value.values())
        elif kind is slice:
            inner = _rows_in((value.start, value.stop, value.step))
        if inner is Mark:
            return Mark
        found = found or inner
    return found


def following(apply: Any) -> Any:
    """Returns `torch.autograd.Function.apply` so that it is followed as one call."""

    @wraps(apply.__func__)
    def call(kind: Any, *args: Any, **kwargs: Any) -> Any:
        def plain(*args: Any, **kwargs: Any) -> Any:
            return apply.__func__(kind, *args, **kwargs)

        if all(mark_of(tensor) is None for tensor in tensors_in((args, kwargs))):
            return plain(*args, **kwargs)
        with without_functions():
            return follow(plain, kind.__name__, args, kwargs)

    return classmethod(call)


@dataclass
class _Call:
    """A call that is followed.

    Attributes:
        batch: the batch of its rows.
        name: of the function.
        args: the positional arguments.
        kwargs: the arguments by name.
        marks: of the operands.
        total: the tensor to which it adds rows; None: it does not.
        twin: in a proof, the call for this rank's rows, too.
    """

    batch: LoadedBatch
    name: str
    args: Any
    kwargs: Any
    marks: list[Mark]
    total: _Total | None
    twin: Twin | None = None


def follow(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Makes a call with marked tensors or numbers of rows, and marks its results; a proof calls twice."""
    marks = [mark for mark in map(mark_of, tensors_in((args, kwargs))) if mark is not None]
    batch, earlier = _origin(marks) if marks else (next(counts_in((args, kwargs))).batch, None)
    again = _again(func, name, args, kwargs)
    target = _base_of(args[0]) if _is_in_place(name) else None
    base = _Base(target, args[0], again) if target is not None else None
    call = _Call(batch, name, args, kwargs, marks, _total_of(name, args, kwargs) if again is None else None)
    if batch.proof is not None and batch.is_open:
        call.twin = batch.proof.call(func, args, kwargs, _is_in_place(name))
        result = call.twin.result
    else:
        result = func(*numbered(args, _here), **numbered(kwargs, _here))
    for index, tensor in enumerate(tensors_in(args[0] if name == "__setitem__" else result)):
        mark = Mark(batch, user_line())
        mark.earlier = earlier
        mark.part = call.twin.parts[index] if call.twin is not None else None
        if again is not None and (marks or not tensor.dim()):
            mark.call = again if isinstance(result, Tensor) or result is None else _item_of(again, index)
            if tensor.requires_grad:
                _check_combined(call, mark.line)
        elif not (batch.is_open and _set_root(call, tensor, mark)):
            ragged = name in _RAGGED or (name == "__getitem__" and _has_mask(args[1]))
            mark.is_ragged = ragged or any(mark.is_ragged for mark in marks)
        put(tensor, mark)
    if base is not None:
        base.mark(batch)
    return result


def _check_combined(call: _Call, line: str) -> None:
    """Refuses a function of losses that was not part of a proof, unless the ranks' means show its mean."""
    batch, name, operands = call.batch, call.name, (call.args, call.kwargs)
    if batch.proof is not None:
        job.combined.add((name, line))
    if not (batch.is_part and batch.is_open) or (name, line) in job.combined:
        return
    losses = [tensor for tensor in tensors_in(operands) if mark_of(tensor) is not None]
    is_scaled = name in _SCALES and len(losses) == 1 and losses[0] is call.args[0]
    if not (name in _SUMS or is_scaled) or next(counts_in(operands), None) is not None:
        raise refusal(
            f"{line}: {name} computes with a loss where it did not when a batch was computed as a whole and "
            "in parts, so its gradients are unproven: compute it from the first batch on, with a number of "
            "rows as float(number); or use @hvd.consistent"
        )


_here = operator.attrgetter("here")


def _base_of(tensor: Any) -> Tensor | None:
    """Returns the tensor of which a view is about to be changed; None: it is no view, or of the batch."""
    base = tensor._base if isinstance(tensor, Tensor) else None
    return base if mark_of(tensor) is None or mark_of(base) is not None else None


class _Base:
    """The tensor of which a view is about to be changed by rows, such as `hits` in `hits[label] += right`."""

    def __init__(self, base: Tensor, view: Tensor, again: Callable[[], Any] | None) -> None:
        """`again` computes the view with values over the whole batch."""
        self._base, self._view, self._again = base, view, again
        self._former = again and _again(torch.clone, "clone", (base,), {})

    def mark(self, batch: LoadedBatch) -> None:
        known = mark_of(self._base)  # in a proof, with the part
        mark = Mark(batch, user_line())
        mark.part = known.part if known is not None else None
        mark.call = self._value if self._former is not None else None
        put(self._base, mark)

    def _value(self) -> Tensor:
        assert self._former is not None
        assert self._again is not None
        value, offset = self._former(), self._view.storage_offset() - self._base.storage_offset()
        value.as_strided(self._view.size(), self._view.stride(), offset).copy_(self._again())
        return value


def _set_root(call: _Call, tensor: Tensor, mark: Mark) -> bool:
    """Makes a result a root, if the ranks' values may give its values over the whole batch."""
    from sirtaki.torch.auto.arguments import key_of

    if tensor.dim() and (call.name not in _REDUCTIONS or tensor.requires_grad):
        return False
    key = key_of(call.batch, call.name, mark.line, call.args, call.kwargs)
    if tensor.dim() and not _has_no_rows(call, key, tensor, mark):
        return False
    total, part = call.total, mark.part
    value = tensor.detach().clone() if total is None else total.added(tensor)
    root = mark.root = Root(key, value, tensor.requires_grad)
    if call.twin is not None and part is not None and part.dim() == tensor.dim():
        own = part.detach().clone() if total is None else total.added_in_part(part)
        root.part = call.twin.key_of(root), own, _is_of_all_rows(call)
    root.is_ragged = any(operand.is_ragged for operand in call.marks)
    root.is_row = call.name in _PICKS and _has_all_rows(call.args[0], call.batch)
    if total is not None:
        mark.call = partial(total.value, call.batch, root)
    call.batch.roots.append(root)
    return True


def _has_no_rows(call: _Call, key: Key, tensor: Tensor, mark: Mark) -> bool:
    """Returns whether a call has summed up all rows of its operands: the parts' results have its shape."""
    proof = call.batch.proof
    if tensor.numel() > rules.LARGEST or (call.name in _ADDITIONS and call.total is None):
        return False
    if proof is None or call.batch.share.total == 1:  # a single row does not show where rows are
        return key in job.shapes
    parts = [(operand.shape, mark_of(operand)) for operand in tensors_in((call.args, call.kwargs))]
    has_rows = any(
        known is not None and known.part is not None and known.part.shape != shape for shape, known in parts
    )
    # A shape that depends on values may be the same on some ranks only.
    return proof.is_true_on_all(has_rows and mark.part is not None and mark.part.shape == tensor.shape)


def _is_of_all_rows(call: _Call) -> bool:
    """Returns whether a call has an operand that has all rows, of the whole batch and of this rank's part."""
    share = call.batch.share
    for tensor in tensors_in((call.args, call.kwargs)):
        mark = mark_of(tensor)
        if mark is None or mark.part is None:
            continue
        sizes = zip(
            tensor.shape, mark.part.shape, strict=False
        )  # of which one counts rows, or elements of rows
        if mark.is_ragged or any(
            size * share.count == part * share.total and size % share.total == 0 for size, part in sizes
        ):
            return True
    return False


class _Total:
    """A tensor without rows to which a call adds rows, such as a histogram."""

    def __init__(self, tensor: Tensor) -> None:
        mark = mark_of(tensor)
        self._before = tensor.detach().clone()
        self._whole = mark.value if mark is not None else None
        self._part = self._before
        if mark is not None and mark.part is not None:
            self._part = mark.part.detach().clone()

    def added(self, tensor: Tensor) -> Tensor:
        """Returns what the call has added."""
        return tensor.detach() - self._before

    def added_in_part(self, part: Tensor) -> Tensor:
        """Returns what the call has added to the tensor of this rank's rows."""
        return part.detach() - self._part

    def value(self, batch: LoadedBatch, root: Root) -> Tensor:
        """Returns the values over the whole batch."""
        before = self._before if self._whole is None else self._whole()
        return before + rules.whole(batch, root)


def _total_of(name: str, args: Any, kwargs: Any) -> _Total | None:
    """Returns the tensor to which a call adds rows; None: it does not, or its values are not known."""
    if name not in _ADDITIONS or (name == "index_put_" and not _accumulates(args, kwargs)):
        return None
    mark = mark_of(args[0])
    is_known = (mark is None or mark.has_value) and args[0].numel() <= rules.LARGEST
    return _Total(args[0]) if is_known else None


def _accumulates(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))


def _origin(marks: list[Mark]) -> tuple[LoadedBatch, str | None]:
    """Returns the batch of a result, and the line of an operand if it adds rows of an earlier batch."""
    kept = next((mark for mark in marks if not mark.batch.is_open and mark.batch.is_part), None)
    earlier = next((mark.earlier for mark in marks if mark.earlier is not None), None)
    if kept is not None:
        is_mixed = any(mark.batch is not kept.batch for mark in marks)
        return kept.batch, earlier or (kept.line if is_mixed else None)
    # All ranks have the value of one process if an earlier batch was computed as a whole.
    return next((mark.batch for mark in marks if mark.batch.is_open), marks[0].batch), earlier


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"


def _has_all_rows(tensor: Any, batch: LoadedBatch) -> bool:
    """Returns whether a tensor has an element for each of several rows."""
    return isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.size(0) == batch.count > 1


def _has_mask(index: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(index))


def _item_of(again: Callable[[], Any], index: int) -> Callable[[], Any]:
    return lambda: list(tensors_in(again()))[index]


def _again(func: Any, name: str, args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """Returns a function that computes a call with values over the whole batch; None: they are not known."""
    tensors = list(tensors_in((args, kwargs)))
    marks = [mark for mark in map(mark_of, tensors) if mark is not None]
    size = sum(tensor.numel() for tensor in tensors if mark_of(tensor) is None)
    if _is_in_place(name) and isinstance(args[0], Tensor):
        size = max(size, args[0].numel())
    if name == "grad" or size > rules.LARGEST or not all(mark.has_value for mark in marks):
        return None
    kept, named = _kept(args), _kept(kwargs)

    def call() -> Any:
        with torch.no_grad():
            positional = _valued(kept)
            if _is_in_place(name):
                positional = (positional[0].clone(), *positional[1:])
            result = func(*positional, **_valued(named))
            return positional[0] if name == "__setitem__" else result

    return call


class _Kept:
    """An operand that is a marked tensor."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self.value = value


def _kept(value: Any) -> Any:
    def kept(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            mark = mark_of(leaf)
            return _Kept(mark.value) if mark is not None else leaf.detach().clone()
        return with_numbers(leaf, int)

    return mapped(value, kept)


def _valued(value: Any) -> Any:
    return mapped(value, lambda _, leaf: leaf.value() if isinstance(leaf, _Kept) else leaf)


# ---- Numbers of rows ---------------------------------------------------------------------------------------


def _metadata(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    result, tensor = func(*args, **kwargs), args[0]
    if isinstance(result, Tensor):  # Tensor.data and the like
        return _attribute(func, name, args, result)
    if isinstance(result, bool) or not isinstance(result, int | torch.Size):
        return result
    if name == "__get__" and isinstance(result, int) and func != Tensor.nbytes.__get__:  # type: ignore[attr-defined]
        return result  # Tensor.ndim and the like
    sizes = _sizes(tensor, sys._getframe(3))
    if sizes is None:
        return result
    if isinstance(result, torch.Size):
        return sizes
    if name != "size":
        return sizes.numel() * (tensor.element_size() if name == "__get__" else 1)
    return sizes[args[1] if len(args) > 1 else kwargs["dim"]]


def _attribute(func: Any, name: str, args: Any, result: Tensor) -> Tensor:
    mark = mark_of(args[0])
    if mark is None or result is args[0] or mark_of(result) is not None:
        return result
    if mark.whole is None or func != Tensor.data.__get__:  # type: ignore[attr-defined]
        return follow(func, name, args, {})
    put(result, mark)
    return result


def _sizes(tensor: Tensor, caller: FrameType) -> RowShape | None:
    """Returns the shape of a marked tensor with its numbers of rows; None if it has none."""
    mark = mark_of(tensor)
    if mark is None or mark.has_value or not tensor.dim():
        return None
    batch, shape = mark.batch, tuple(tensor.shape)
    if batch.proof is not None and mark.part is not None and mark.part.dim() == len(shape):
        parts, wholes = tuple(mark.part.shape), shape
        if not is_internal(caller.f_code.co_filename):
            _learn(mark, caller, parts, wholes)
    elif batch.is_part and not is_internal(caller.f_code.co_filename):
        if mark.is_ragged and not _is_of_module(caller):
            raise _no_count(mark)
        parts, wholes = shape, tuple(_whole_size(mark, caller, axis, size) for axis, size in enumerate(shape))
    else:
        return None
    if parts == wholes:
        return None
    return RowShape(
        RowCount(part, whole, batch) if part != whole else whole
        for part, whole in zip(parts, wholes, strict=True)
    )


def _learn(mark: Mark, caller: FrameType, parts: tuple[int, ...], wholes: tuple[int, ...]) -> None:
    """Notes which axes that this place of the script reads count rows."""
    batch = mark.batch
    if batch.part_count == batch.share.total:  # a batch of one row does not tell them apart
        return
    for axis, (part, whole) in enumerate(zip(parts, wholes, strict=True)):
        is_multiple = part * batch.share.total == whole * batch.part_count
        if part != whole and not is_multiple and not _is_of_module(caller):
            raise _no_count(mark)
        is_of_rows = part != whole and is_multiple
        for site in _sites_of(mark, caller, axis):
            job.sites[site] = is_of_rows if job.sites.get(site, is_of_rows) is is_of_rows else None


def _whole_size(mark: Mark, caller: FrameType, axis: int, size: int) -> int:
    """Returns the size for the whole batch of an axis of this rank's rows."""
    batch = mark.batch
    known = (job.sites[site] for site in _sites_of(mark, caller, axis) if site in job.sites)
    is_of_rows = next(known, None)
    if is_of_rows is None:  # the proof did not read it here, or read sizes of both kinds
        is_of_rows = not axis and size == batch.count and not _is_of_module(caller)
    return size // batch.count * batch.share.total if is_of_rows and size % batch.count == 0 else size


def _no_count(mark: Mark) -> UnsupportedError:
    return refusal(
        f"{user_line()}: this number of rows depends on the values of this rank's part of the "
        f"batch (selected at {mark.line}); count with a sum over a mask: (predictions == targets).sum()"
    )


def _sites_of(mark: Mark, caller: FrameType, axis: int) -> tuple[Site, Site]:
    """Returns the place of the script with the line that has computed the tensor, and the place alone."""
    place = caller.f_code.co_filename, caller.f_code.co_firstlineno, caller.f_lasti, axis
    return (*place, mark.line), (*place, "")


def _is_of_module(frame: FrameType | None) -> bool:
    """Returns whether code belongs to the call of a torch module."""
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame is not None


def length(value: Any) -> Any:
    """Returns `len(value)`, as the modules of the script see it."""
    if isinstance(value, Tensor) and mark_of(value) is not None:
        caller = sys._getframe(1)
        with without_functions():
            sizes = _sizes(value, caller)
        if sizes is not None:
            return sizes[0]
    return len(value)


def count_rows() -> None:
    """Makes `len(tensor)` in the script's own modules the number of rows of the whole batch."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and not is_internal(file) and "len" not in vars(module):
            vars(module)["len"] = length


# ---- Reading -----------------------------------------------------------------------------------------------


def _read(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    from sirtaki.torch.auto.loaders import end_closed_batch

    end_closed_batch()
    marked = [tensor for tensor in tensors_in((args, kwargs)) if mark_of(tensor) is not None]
    for tensor in marked:
        mark = mark_of(tensor)
        if mark is not None and not mark.has_value and not mark.is_delivered:
            raise refusal(
                f"{user_line()}: {name} reads a tensor that each rank has computed from its rows of a "
                f"batch only (at {mark.line}), and its value over the whole batch is not known. Losses, "
                "and sums and means over all rows, can be read in the step that computes them; or use "
                "@hvd.consistent with out="
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


def _replaced(value: Any, wholes: dict[int, Tensor]) -> Any:
    return mapped(value, lambda _, leaf: wholes.get(id(leaf), leaf))


def _whole(tensor: Tensor) -> Tensor:
    """Returns a scalar with its value over the whole batch, or all rows of what the loader has delivered."""
    mark = mark_of(tensor)
    assert mark is not None
    if mark.whole is not None:
        return mark.whole
    result = tensor.detach().clone()
    if mark.batch.is_part:
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
