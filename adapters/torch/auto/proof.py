"""The proof that a training step may be split: a batch is computed as a whole, and in parts.

While the script computes the whole batch, each call that depends on rows is made again for this rank's rows.
At each backward pass the gradients of all parts, combined over the ranks, are compared with those of the
whole batch, with which the training goes on. Operations that use rows in other ways are found below autograd.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.user_code import user_line
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.ops.requests import Sum
from sirtaki.common.semantics import hint
from sirtaki.common.training.shares import Share
from sirtaki.torch._private import DispatchMode, without_functions
from sirtaki.torch.auto import rules
from sirtaki.torch.auto.arguments import key_of_part
from sirtaki.torch.auto.job import Key, LoadedBatch, Root, job, refusal
from sirtaki.torch.auto.marks import Mark, count_rows, mark_of, put
from sirtaki.torch.auto.row_counts import numbered, with_numbers
from sirtaki.torch.auto.rules import tolerance
from sirtaki.torch.ops.collectives import grouped_allreduce
from sirtaki.torch.ops.nested import mapped, tensors_in
from sirtaki.torch.training.reducer import Nesting

_LARGEST_STATE = 1 << 16  # elements of a tensor that a call may change without its name telling so
_DRAWS = (
    "the steps of this loop draw random numbers, as dropout does. Each rank draws its own for its rows, so "
    "the numbers are not those of one process"
)
_CAUGHT = (
    "the script has caught an error of this step, which is therefore unproven: every rank computes the whole "
    "batch, until a step ends without one"
)


def start(batch: LoadedBatch) -> None:
    """Begins to compute this rank's rows beside the whole batch."""
    devices = sorted({parameter.device.type for parameter in job.parameters()} - {"cpu"})
    if devices:
        raise UnsupportedError(
            f"{batch.iteration.place}: the model is on a {devices[0]} device, and --auto trains on CPUs: on "
            "other devices, use @hvd.consistent or hvd.DistributedOptimizer"
        )
    count_rows()
    batch.proof = Proof(batch, job.parameters())


@dataclass
class Twin:
    """A call for the whole batch and for this rank's rows.

    Attributes:
        batch: the batch.
        result: the result for the whole batch.
        parts: for each tensor of the result, the tensor of this rank's rows; None if it is unknown.
        args: the arguments for this rank's rows.
        kwargs: the same, by name.
    """

    batch: LoadedBatch
    result: Any
    parts: Sequence[Tensor | None]
    args: Any
    kwargs: Any

    def key_of(self, root: Root) -> Key:
        """Returns the key that a root has for this rank's rows."""
        return key_of_part(self.batch, root.key, self.args, self.kwargs)


class Proof:
    """This rank's rows of a batch, which are computed beside the whole batch.

    Attributes:
        parameters: of all optimizers.
    """

    def __init__(self, batch: LoadedBatch, parameters: Sequence[Tensor]) -> None:
        self._batch, self.parameters = batch, parameters
        self._failure: str | None = None
        self._layers = Layers(batch)
        self._hidden = HiddenUses()
        self._drawn = torch.get_rng_state()
        self._are_means = False  # whether gradients are those of the parts
        self._hidden.__enter__()

    def close(self) -> None:
        """Ends the computation of the part."""
        if self._batch.proof is self:
            self._batch.proof = None
            self._hidden.__exit__(None, None, None)
            self._layers.close()

    def following(self) -> Nesting:
        """Allows operations inside to use rows."""
        return self._hidden.following

    def watch(self, tensor: Tensor) -> None:
        """Finds operations on a marked tensor that are not followed."""
        self._hidden.add(tensor)

    def is_true_on_all(self, is_true: bool) -> bool:
        """Returns whether a statement about the parts is true on all ranks, which call it together."""
        return all(gather_objects(self._batch.share.context, is_true, "auto.parts", global_process_set))

    @property
    def failure(self) -> str | None:
        """Returns why the part cannot be computed; None: it can."""
        return self._failure or self._hidden.found

    def _failed(self, text: str) -> None:
        self._failure = self._failure or f"{user_line()}: {text}"

    # Calls

    def call(self, func: Any, args: Any, kwargs: Any, is_in_place: bool) -> Twin:
        """Makes a call for the whole batch, and for this rank's rows."""
        operands = _Operands(self._batch, args, kwargs, is_in_place)
        before = torch.get_rng_state()
        with self.following():
            result = func(*numbered(args, int), **numbered(kwargs, int))
            after = torch.get_rng_state()
            count = len(_tensors(result, args))
            unknown = Twin(self._batch, result, [None] * count, (), {})
            if self.failure is not None or not operands.are_known:
                return unknown
            own_args, own_kwargs = operands.of_part(args), operands.of_part(kwargs)
            parts = self._part(func, own_args, own_kwargs, None if torch.equal(before, after) else before)
            torch.set_rng_state(after)
            if trouble := operands.settle():
                self._failed(trouble)
        if parts is None:
            return unknown
        if len(parts) != count:
            self._failed(
                f"{getattr(func, '__name__', func)} makes {count} tensors of the whole batch and "
                f"{len(parts)} of this rank's rows: code that uses rows one by one cannot be split"
            )
            return unknown
        return Twin(self._batch, result, parts, own_args, own_kwargs)

    def _part(self, func: Any, args: Any, kwargs: Any, state: Tensor | None) -> list[Tensor] | None:
        """Returns the tensors that a call makes of this rank's rows; None if it fails."""
        try:
            if state is not None:
                torch.set_rng_state(state)
            with nullcontext() if state is None else Drawing(self._batch):
                return _tensors(func(*args, **kwargs), args)
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            return None

    # Backward passes

    def backward(self, plain: Callable[..., None], args: Any, kwargs: Any) -> None:
        """Makes a backward pass over the whole batch, and compares gradients. All ranks call it together.

        Raises:
            UnsupportedError: the parts have other gradients. The proof is over; the parameters have the
                gradients of the whole batch.
        """
        line = user_line()
        before = [parameter.grad for parameter in self.parameters]
        for tensor in self.parameters:
            tensor.grad = None
        try:
            with self.following():
                parts = self._gradients_of_part(*args, **kwargs)
                plain(*args, **kwargs)
            self._compare([parameter.grad for parameter in self.parameters], parts, line)
        except BaseException as error:
            self._batch.is_refused = isinstance(error, UnsupportedError)
            self.close()
            raise
        finally:
            for tensor, former in zip(self.parameters, before, strict=True):
                tensor.grad = _sum(former, tensor.grad)

    def _gradients_of_part(
        self, losses: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False,
        grad_variables: Any = None, inputs: Any = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Returns the gradients of this rank's rows, with the arguments of `torch.autograd.backward`."""
        operands = _Operands(self._batch, (losses, grad_tensors), {}, False)
        found: list[Tensor | None] = [None] * len(self.parameters)
        asked = None if inputs is None else {id(tensor) for tensor in tensors_in(inputs)}
        trained = [
            index
            for index, parameter in enumerate(self.parameters)
            if parameter.requires_grad and (asked is None or id(parameter) in asked)
        ]
        if self.failure is not None or not operands.are_known or not trained:
            return found
        outputs, ones = (list(tensors_in(tree)) for tree in operands.of_part((losses, grad_tensors)))
        try:
            gradients = torch.autograd.grad(
                outputs, [self.parameters[index] for index in trained], ones or None, retain_graph=True,
                create_graph=create_graph, allow_unused=True,
            )  # fmt: skip
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            return found
        for index, gradient in zip(trained, gradients, strict=True):
            found[index] = gradient
        return found

    def _compare(self, wholes: list[Tensor | None], parts: list[Tensor | None], line: str) -> None:
        self._raise_first(line)
        difference = compare(wholes, parts, self._batch.share)
        if difference is Difference.NONE:
            self._are_means = True
        elif difference is not Difference.UNKNOWN:
            raise refusal(self._cause(difference, line))

    def _raise_first(self, line: str) -> bool:
        """Raises UnsupportedError on all ranks if any failed; returns whether any script caught an error."""
        context, mine = self._batch.share.context, (self.failure, self._batch.has_refused)
        found = gather_objects(context, mine, "auto.proof", global_process_set)
        for rank, (text, _) in enumerate(found):
            if text is not None:
                raise refusal(
                    f"{line}: this step cannot be computed on a part of a batch as on the whole: on rank "
                    f"{rank}, {text}. Use @hvd.consistent, or hvd.DistributedOptimizer"
                )
        return any(has_refused for _, has_refused in found)

    def _cause(self, difference: Difference, line: str) -> str:
        batch = self._batch
        losses = [root for root in batch.roots if root.requires_grad]
        where = f" (its loss: {losses[-1].key[0]} at {losses[-1].line})" if losses else ""
        text = (
            f"{line}: the gradients of this backward pass{where} over a batch of {batch.share.total} rows "
            f"are not the mean of those over the parts of {batch.share.context.size} ranks, so the ranks "
            "cannot split it: "
        )
        kinds = [type(module).__name__ for module in self._layers.modules.values() if module.training]
        norms = sorted({kind for kind in kinds if "BatchNorm" in kind})
        if norms:
            return text + (
                f"{' and '.join(norms)} normalises by the statistics of the batch, which each part has of "
                "its own. Use GroupNorm or LayerNorm, put the layer in evaluation mode, or run a script "
                "with hvd.SyncBatchNorm"
            )
        if difference is Difference.SUM:
            return text + (
                'they are their sum: the loss adds rows up. Use a mean, such as reduction="mean", or '
                "divide the sum by the number of rows"
            )
        return text + (
            "the rows do not count by themselves. Likely causes: a mean over a mask, with ignore_index or "
            "with class weights; a loss that compares rows with each other (in-batch negatives); a batch "
            "whose rows are not along the first axis of its tensors (batch_first=True). Use "
            "@hvd.consistent, or hvd.DistributedOptimizer, whose loss is that of each rank"
        )

    def finish(self) -> None:
        """Ends the proof: narrows the rules of scalars. All ranks call it together.

        Raises:
            UnsupportedError: the state of a layer depends on how the batch is split.
        """
        batch, place = self._batch, self._batch.iteration.place
        with self.following():
            found = self._layers.difference()
        if found:
            self._failed(
                f"{found} is another one after the whole batch than after this rank's part of it, so the "
                "layer keeps statistics of the batch"
            )
        self.close()
        if self._raise_first(place):
            if not job.has_caught and batch.share.context.rank == 0:
                hint(f"{place}: {_CAUGHT}")
            job.has_caught = True
            return
        if self._are_means:
            batch.iteration.state.proven.add(batch.share.is_even)
        if not torch.equal(self._drawn, torch.get_rng_state()) and batch.share.context.rank == 0:
            hint(f"{place}: {_DRAWS}")
        mine = [root.part for root in batch.roots]
        of_ranks = gather_objects(batch.share.context, mine, "auto.roots", global_process_set)
        with_rows = [rank for rank, rows in zip(of_ranks, batch.share.counts, strict=True) if rows]
        counts = [rows for rows in batch.share.counts if rows]
        for root, *parts in zip(batch.roots, *with_rows, strict=True):
            if all(part is not None and part[0] == root.key for part in parts):
                rules.narrow(root, [part[1] for part in parts], counts, all(part[2] for part in parts))


def _tensors(result: Any, args: Any) -> list[Tensor]:
    """Returns the tensors that a call has made; `Tensor.__setitem__` changes its operand instead."""
    return list(tensors_in(args[0] if result is None and args else result))


@torch.no_grad()
def _sum(former: Tensor | None, new: Tensor | None) -> Tensor | None:
    if former is None or new is None:
        return new if former is None else former
    return former.add_(new)


# ---- The operands of a call, for this rank's rows ------------------------------------------------------


class _Operands:
    """The operands of a call, for the whole batch and for this rank's rows.

    A tensor without rows serves for both. It is copied if the call may change it.

    Attributes:
        are_known: whether all operands are known for this rank's rows.
    """

    def __init__(self, batch: LoadedBatch, args: Any, kwargs: Any, is_in_place: bool) -> None:
        self._batch = batch
        self._own: dict[int, Tensor] = {}  # by the tensor of the whole batch
        self._shared: list[tuple[Tensor, int]] = []  # with the number of changes so far
        self._written = args[0] if is_in_place and args else kwargs.get("out")
        self._base: Tensor | None = None  # of the copy, if the tensor that is written is a view
        self.are_known = True
        for tensor in tensors_in((args, kwargs)):
            mark = mark_of(tensor)
            if mark is not None and mark.batch is batch:
                if mark.part is None:
                    self.are_known = False
                else:
                    self._own[id(tensor)] = mark.part
            elif id(tensor) not in self._own and not tensor.is_inference():
                self._add_shared(tensor)

    def _add_shared(self, tensor: Tensor) -> None:
        if tensor is self._written:
            self._own[id(tensor)] = self._copy(tensor)
        else:
            self._shared.append((tensor, tensor._version))
            if not tensor.requires_grad and tensor.numel() <= _LARGEST_STATE:
                self._own[id(tensor)] = tensor.clone()

    def _copy(self, tensor: Tensor) -> Tensor:
        base = tensor._base
        if base is None:
            return tensor.clone()
        self._base = base.detach().clone()
        offset = tensor.storage_offset() - base.storage_offset()
        return self._base.as_strided(tensor.size(), tensor.stride(), offset)

    def of_part(self, value: Any) -> Any:
        """Returns arguments for this rank's rows."""

        def own(_: Any, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._own.get(id(leaf), leaf)
            return with_numbers(leaf, lambda count: count.part)

        return mapped(value, own)

    def settle(self) -> str | None:
        """Marks tensors that the call has changed beside its results; returns why it cannot."""
        if self._base is not None:
            self._mark(self._written._base, self._base)
        for tensor, version in self._shared:
            if tensor._version == version:
                continue
            if id(tensor) not in self._own:
                return "the call changes a tensor that does not belong to the rows"
            self._mark(tensor, self._own[id(tensor)])
        return None

    def _mark(self, tensor: Tensor, part: Tensor) -> None:
        mark = Mark(self._batch, user_line())
        mark.part = part
        put(tensor, mark)


# ---- Operations that use rows without being followed ---------------------------------------------------


class HiddenUses(DispatchMode):
    """Finds an operation below autograd that uses marked tensors, and is not followed.

    Attributes:
        following: entered by calls that are followed.
        found: the first such line and operation, as text; None: there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.following = Nesting()
        self.found: str | None = None
        self._memory: dict[int, list[weakref.ref[Tensor]]] = {}

    def add(self, tensor: Tensor) -> None:
        """Begins to watch the memory of a marked tensor."""
        if tensor.layout == torch.strided and tensor.numel():
            known = self._memory.setdefault(tensor.untyped_storage().data_ptr(), [])
            known[:] = [reference for reference in known if reference() is not None]
            known.append(weakref.ref(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_hidden = not self.following.depth and self.found is None
        if is_hidden and any(map(self._is_marked, tensors_in((args, kwargs)))):
            self.found = f"{user_line()}: {func} computes with rows of the batch where it cannot be followed"
        return func(*args, **kwargs)

    def _is_marked(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or not tensor.numel():
            return False
        known = self._memory.get(tensor.untyped_storage().data_ptr(), ())
        return any(mark_of(reference()) is not None for reference in known)


# ---- The buffers of layers, which may keep statistics of the batch -------------------------------------


class Layers:
    """The modules that are called during a batch."""

    def __init__(self, batch: LoadedBatch) -> None:
        self._batch = batch
        self.modules: dict[int, nn.Module] = {}
        self._hook = register_module_forward_pre_hook(self._called)

    def _called(self, module: nn.Module, _: Any) -> None:
        self.modules[id(module)] = module

    def close(self) -> None:
        self._hook.remove()

    def difference(self) -> str | None:
        """Returns the first buffer that whole batch and part make unequal, as text; None: all are equal."""
        for module in self.modules.values():
            for name, buffer in module.named_buffers(recurse=False):
                mark = mark_of(buffer)
                if mark is None or mark.batch is not self._batch:
                    continue
                with without_functions():
                    is_close = mark.part is not None and _is_close(buffer, mark.part)
                if not is_close:
                    return f"the buffer {name!r} of {type(module).__name__}"
        return None


def _is_close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or not first.dtype.is_floating_point:
        return torch.equal(first, second)
    bound = tolerance(first.dtype)
    largest = float(first.abs().max()) if first.numel() else 0.0
    return torch.allclose(first, second, rtol=bound, atol=bound * largest, equal_nan=True)


# ---- Random numbers in a proof -------------------------------------------------------------------------
# The part of a batch draws the numbers that the whole batch draws for the same rows.


class Drawing(DispatchMode):
    """Draws random numbers for all rows of a batch, and returns the numbers of this rank's rows.

    It sees the operations below autograd, so dropout inside of layers is among them. An operation that it
    does not know draws as always; the gradients then differ, and the step is refused.
    """

    def __init__(self, batch: LoadedBatch) -> None:
        super().__init__()
        self._count, self._total, self._rows = batch.part_count, batch.share.total, batch.rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return self._dropout(func, args, kwargs)
        if args and isinstance(args[0], Tensor):
            return self._like(func, name, args, kwargs)
        return self._made(func, args, kwargs)

    def _axis(self, shape: Any) -> tuple[int, int]:
        """Returns the axis of the rows, and how many elements each has there; (-1, 0): there is none."""
        if shape and self._count > 1 and shape[0] and shape[0] % self._count == 0:
            return 0, shape[0] // self._count
        return next(((axis, 1) for axis, size in enumerate(shape) if size == self._count), (-1, 0))

    def _enlarged(self, shape: Any) -> list[int]:
        axis, each = self._axis(shape)
        return [each * self._total if place == axis else size for place, size in enumerate(shape)]

    def _own(self, whole: Tensor, shape: Any) -> Tensor:
        axis, each = self._axis(shape)
        if axis < 0:
            return whole
        return whole.narrow(axis, self._rows.start * each, self._count * each).contiguous()

    def _like(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        own = args[0]
        if any(isinstance(argument, Tensor) for argument in args[1:]) or name in (
            "bernoulli",
            "multinomial",
            "normal",
        ):
            return func(*args, **kwargs)
        # Numbers are drawn in the order of the memory.
        order = sorted(range(own.dim()), key=own.stride, reverse=True)
        whole = torch.empty_permuted(self._enlarged(own.shape), order, dtype=own.dtype)
        drawn = func(whole, *args[1:], **kwargs)
        if name.endswith("_"):
            return own.copy_(self._own(drawn, own.shape))
        return self._own(drawn, own.shape)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        place = next(
            (index for index, argument in enumerate(args) if isinstance(argument, list | tuple)), None
        )
        if place is None:
            return func(*args, **kwargs)
        whole = func(*args[:place], self._enlarged(args[place]), *args[place + 1 :], **kwargs)
        return self._own(whole, args[place])

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> Any:
        own = args[0]
        whole, mask = func(own.new_ones(self._enlarged(own.shape)), *args[1:], **kwargs)
        return own * self._own(whole, own.shape), self._own(mask, own.shape)


# ---- The comparison of a batch's gradients with those of its parts -------------------------------------


_SMALL = 0.01  # of the norm of all gradients: a smaller gradient may differ more, relative to its own


class Difference(Enum):
    """The outcome of a comparison."""

    NONE = auto()
    UNKNOWN = auto()  # all gradients are zero, or not finite
    OTHER = auto()
    SUM = auto()  # the whole is the sum of the parts


def compare(wholes: Sequence[Tensor | None], parts: Sequence[Tensor | None], share: Share) -> Difference:
    """Compares the gradients of a whole batch with the mean over rows of the parts'. All ranks call it.

    The decision is the same on all ranks, because they exchange what they compare.
    """
    pairs = [
        (
            _dense(whole if whole is not None else torch.zeros_like(part)),  # type: ignore[arg-type]
            part if part is None else _dense(part),
        )
        for whole, part in zip(wholes, parts, strict=True)
        if whole is not None or part is not None
    ]
    if not pairs:
        return Difference.UNKNOWN
    means = _combined(pairs, share.weight, share, "auto.mean")
    norms = [float(whole.double().norm()) for whole, _ in means]
    scale = math.sqrt(math.fsum(norm * norm for norm in norms))
    outcome = Difference.UNKNOWN
    if math.isfinite(scale) and scale:
        outcome = Difference.NONE if _are_close(means, norms, scale) else Difference.OTHER
    # That of the rank with the largest difference: rounding may tell ranks apart.
    outcomes = gather_objects(share.context, outcome.value, "auto.outcome", global_process_set)
    outcome = Difference(max(outcomes))
    if outcome is Difference.OTHER:
        sums = _combined(pairs, 1.0, share, "auto.sum")
        if _are_close(sums, norms, scale):
            outcome = Difference.SUM
    return outcome


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()


def _combined(
    pairs: Sequence[tuple[Tensor, Tensor | None]], factor: float, share: Share, name: str
) -> list[tuple[Tensor, Tensor]]:
    """Returns the whole gradients, with the sums over ranks of the parts' times a factor."""
    scaled = []
    for whole, part in pairs:
        wide = torch.promote_types(whole.dtype, torch.float32)
        is_none = part is None or not share.count
        scaled.append(torch.zeros_like(whole, dtype=wide) if is_none else part.to(wide) * factor)  # type: ignore[union-attr]
    sums = grouped_allreduce(scaled, op=Sum, name=name)
    return [(whole, total) for (whole, _), total in zip(pairs, sums, strict=True)]


def _are_close(pairs: Sequence[tuple[Tensor, Tensor]], norms: Sequence[float], scale: float) -> bool:
    return all(
        float((whole.double() - total.double()).norm()) <= tolerance(whole.dtype) * (norm + _SMALL * scale)
        for (whole, total), norm in zip(pairs, norms, strict=True)
    )
