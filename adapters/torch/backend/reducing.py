"""The operations of a process group that combine tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, ReduceOptions, Work

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.requests import Reduction
from sirtaki.torch.backend.submission import RequestPart, Submission
from sirtaki.torch.backend.tensors import (
    assign,
    joined,
    require_elements,
    require_equal,
    rows,
    shares_memory,
    single,
    whole,
    written,
)
from sirtaki.torch.ops.tensors import from_output, plain_name, refuse_overlap

_SUM = ReduceOptions()  # a sum, to rank 0


class Reducing(Submission):
    """All-reduces, reduces and reduce-scatters."""

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = _SUM) -> Work:
        """Combines a tensor over all ranks, in place."""
        tensor = single(tensors, "all_reduce")
        part = self._combination(tensor, tensor, opts.reduceOp)
        return self.submit(self.names.collectives, [part], [tensor], opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = _SUM) -> Work:
        """Combines several tensors over all ranks, in place."""
        parts = [self._combination(tensor, tensor, opts.reduceOp) for tensor in tensors]
        return self.submit(self.names.collectives, parts, tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = _SUM) -> Work:
        """Reduces a tensor over all ranks; only the root's tensor is overwritten."""
        tensor = single(tensors, "reduce")
        target = tensor if opts.rootRank == self.rank() else None
        part = self._combination(tensor, target, opts.reduceOp)
        # The root is part of the name: ranks that name different ones must not get a result.
        return self.submit(self.names.collectives, [part], [tensor], opts, f".to{opts.rootRank}")

    def _combination(self, tensor: Tensor, target: Tensor | None, op: Any) -> RequestPart:
        """Describes the combination of a tensor; the result is written to `target`, if it is given."""
        how = reduction_of(op, tensor.dtype)
        if how is None:
            return self._bitwise_combination(tensor, target, op)
        view = whole(tensor)
        if target is None:
            result = torch.empty_like(view.owner)
            return RequestPart(core.ALLREDUCE, view, result.data_ptr(), how=how, keep=result)
        refuse_overlap(target)

        def store(*_: Any) -> None:
            written(target, view.owner)

        return RequestPart(core.ALLREDUCE, view, view.pointer, store, how)

    def _bitwise_combination(self, tensor: Tensor, target: Tensor | None, op: Any) -> RequestPart:
        """Describes a combination that the core cannot compute: of what all ranks have, by each rank."""
        combine = bitwise_of(op, tensor.dtype)

        def store(context: Context, batch: Batch, index: int) -> None:
            gathered = from_output(context, batch, index)
            if target is None:
                return
            combined = gathered[0]
            for row in gathered[1:]:
                combined = combine(combined, row)
            assign(target, combined)

        return RequestPart(core.ALLGATHER, rows(tensor, 1), store=store)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _SUM
    ) -> Work:
        """Reduces a list of tensors over all ranks; rank i receives the reduction of tensor i."""
        output = single(outputs, "the output of reduce_scatter")
        parts = inputs[0] if len(inputs) == 1 else []
        sizes = [tensor.numel() for tensor in parts]
        if len(sizes) == self.size() and len(set(sizes)) > 1:
            require_elements(parts[self.rank()], output.numel(), output, "the input of reduce_scatter")
            part = self._kept(output, joined(parts), sum(sizes[: self.rank()]), opts.reduceOp)
        else:
            require_equal(parts, output, self.size(), "the input of reduce_scatter")
            part = self._scattered(output, joined(parts), opts.reduceOp)
        return self.submit(self.names.collectives, [part], [output], opts)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = _SUM) -> Work:
        """Combines a tensor over all ranks; each rank gets its part of it."""
        part = self._scattered(output, source, opts.reduceOp)
        return self.submit(self.names.collectives, [part], [output], opts)

    reduce_scatter_single = _reduce_scatter_base  # its newer name

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _SUM
    ) -> Work:
        """Works like `_reduce_scatter_base`, for several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        parts = [self._scattered(output, source, opts.reduceOp) for output, source in pairs]
        return self.submit(self.names.collectives, parts, outputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # its newer name

    def _scattered(self, output: Tensor, source: Tensor, op: Any) -> RequestPart:
        require_elements(source, output.numel() * self.size(), output, "the input of reduce_scatter")
        refuse_overlap(output)
        how = reduction_of(op, source.dtype)
        if how is None:
            return self._kept(output, source, output.numel() * self.rank(), op)
        if not self.order.is_ascending:
            source = self.order.parts_to_set(source, [output.numel()] * self.size())
        view, target = rows(source, self.size()), output.detach()
        if not target.is_contiguous() or shares_memory(target, view.owner):
            target = torch.empty_like(target, memory_format=torch.contiguous_format)

        def store(*_: Any) -> None:
            written(output, target)

        return RequestPart(core.REDUCESCATTER, view, target.data_ptr(), store, how, keep=target)

    def _kept(self, output: Tensor, source: Tensor, begin: int, op: Any) -> RequestPart:
        """Describes a reduce-scatter of another kind than the core's, by the combination of all elements.

        This rank keeps those from element `begin` on.
        """
        combined = source.detach().reshape(-1).clone()
        part = self._combination(combined, combined, op)
        combine = part.store

        def store(context: Context, batch: Batch, index: int) -> None:
            combine(context, batch, index)
            assign(output, combined[begin : begin + output.numel()])

        part.store = store
        return part


# ---- The reduce operations of torch.distributed, as those of the core ----------------------------------

# ReduceOp's members compare equal to a ReduceOp, but have another hash: the tables are searched.
_REDUCTIONS = [
    (ReduceOp.SUM, core.SUM),
    (ReduceOp.AVG, core.AVERAGE),
    (ReduceOp.MIN, core.MIN),
    (ReduceOp.MAX, core.MAX),
    (ReduceOp.PRODUCT, core.PRODUCT),
]
_LOGICAL = [(ReduceOp.SUM, core.MAX), (ReduceOp.BOR, core.MAX), (ReduceOp.BAND, core.MIN)]
_BITWISE: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
    (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or),
    (ReduceOp.BXOR, torch.bitwise_xor),
]


def name_of(op: Any) -> str:
    """Returns the name of a reduce operation, as "BAND"."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _found(table: list[tuple[Any, Any]], op: Any) -> Any:
    return next((result for known, result in table if op == known), None)


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction | None:
    """Returns the core's reduction; None if the core has no such operation: see `bitwise_of`.

    A sum of truth values is their maximum, as in NCCL's backend. The core refuses what a dtype cannot do.
    """
    code = _found(_LOGICAL, op) if dtype is torch.bool else None
    if code is None:
        code = _found(_REDUCTIONS, op)
    if code is not None:
        return Reduction(code)
    return Reduction(core.SUM, prescale=_factor_of(op)) if op == ReduceOp.PREMUL_SUM else None


def _factor_of(op: Any) -> float:
    factor = getattr(op, "factor", None)
    if isinstance(factor, Tensor) and factor.numel() == 1:
        factor = factor.item()
    if not isinstance(factor, int | float):
        raise UnsupportedError(
            "PREMUL_SUM works with one factor for all elements, and with a torch that lets it be read: "
            "multiply the tensor, and use SUM"
        )
    return float(factor)


def bitwise_of(op: Any, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function of two tensors that a bitwise reduction applies.

    Raises:
        UnsupportedError: the operation does not exist for this dtype.
    """
    combine: Callable[[Tensor, Tensor], Tensor] | None = _found(_BITWISE, op)
    if combine is None or dtype.is_floating_point or dtype.is_complex:
        raise UnsupportedError(
            f"{name_of(op)} cannot combine elements of dtype {plain_name(dtype)}: bitwise operations are for "
            "integers and truth values"
        )
    return combine
