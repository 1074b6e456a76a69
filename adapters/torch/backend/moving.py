"""The operations of a process group that move or reduce tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ReduceOp, ReduceOptions, Work

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import MismatchError, UnsupportedError
from sirtaki.bindings.request import CPU, Batch
from sirtaki.common.ops.requests import Reduction
from sirtaki.common.ops.tensor import DTYPE_CODES, ROW_MAJOR, TensorView
from sirtaki.torch.backend.submission import (
    RequestPart,
    Submission,
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
from sirtaki.torch.ops.tensors import from_output, plain_name, refuse_overlap, view

_NO_TENSOR = TensorView(0, (0,), DTYPE_CODES["uint8"], ROW_MAJOR, None, CPU)

_FROM_RANK_0 = BroadcastOptions()


class Moving(Submission):
    """Broadcasts, gathers, scatters, all-to-alls and barriers."""

    def barrier(self, opts: Any = None) -> Work:
        """Ends once all ranks have called it."""
        return self.submit(self.names.collectives, [RequestPart(core.BARRIER, _NO_TENSOR)], [], opts)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        """Ends once all ranks have called it. torch calls it for groups with the name gloo only."""
        self.barrier().wait(timeout)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = _FROM_RANK_0) -> Work:
        """Copies the root's tensor to all ranks."""
        tensor = single(tensors, "broadcast")
        refuse_overlap(tensor)
        source = whole(tensor)

        def store(*_: Any) -> None:
            written(tensor, source.owner)

        root = self.members[opts.rootRank]
        part = RequestPart(core.BROADCAST, source, source.pointer, store, root=root)
        return self.submit(self.names.collectives, [part], [tensor], opts)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Copies each rank's tensor to all ranks, into a separate tensor for each sender."""
        targets, source = single(outputs, "the output of all_gather"), single(inputs, "all_gather")
        return self.submit(self.names.collectives, [self._gathered(targets, source)], targets, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Works like `allgather`, for several tensors: `outputs` has a list of all tensors for each rank.

        Raises ValueError if there is not one list for each rank, or not one tensor for each input.
        """
        counts = [len(targets) for targets in outputs]
        if counts != [len(inputs)] * self.size():
            raise ValueError(
                f"the output of all_gather_coalesced has lists of {counts} tensors; it has to be one list "
                f"for each of the {self.size()} ranks, of {len(inputs)} tensors as in the input"
            )
        of_tensors = zip(*outputs, strict=True)
        parts = [self._gathered(targets, source) for targets, source in zip(of_tensors, inputs, strict=True)]
        results = [target for targets in outputs for target in targets]
        return self.submit(self.names.collectives, parts, results, opts)

    def _gathered(self, targets: Sequence[Tensor], source: Tensor) -> RequestPart:
        """Describes an all-gather; if sizes differ, an all-to-all that checks the received row counts."""
        sizes = [target.numel() for target in targets]
        if len(set(sizes)) <= 1:
            require_equal(targets, source, self.size(), "the output of all_gather")
            store = _assign_parts(self.order.to_set(targets))
            return RequestPart(core.ALLGATHER, rows(source, 1), store=store)
        require_alike([source, *targets])
        if len(sizes) != self.size() or sizes[self.rank()] != source.numel():
            raise ValueError(
                f"the outputs of all_gather have {sizes} elements; they have to be one for each of the "
                f"{self.size()} ranks, with this rank's {source.numel()} elements at {self.rank()}"
            )
        everywhere = view(joined([source] * self.size()))
        store = _assign_parts(self.order.to_set(targets))
        return self._exchange(everywhere, [source.numel()] * self.size(), sizes, store)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Work:
        """Copies each rank's tensor to all ranks, into consecutive parts of a single tensor."""
        return self.allgather_into_tensor_coalesced([output], [source], opts)

    all_gather_single = _allgather_base  # its newer name

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Works like `_allgather_base`, for several tensors."""
        parts = []
        for output, source in zip(outputs, inputs, strict=True):
            count = source.numel() * self.size()
            require_elements(output, count, source, "the output of all_gather_into_tensor")
            store = self._assign_in_order(output, [source.numel()] * self.size())
            parts.append(self._offering(RequestPart(core.ALLGATHER, rows(source, 1), store=store), output))
        return self.submit(self.names.collectives, parts, outputs, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # its newer name

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = _FROM_RANK_0
    ) -> Work:
        """Copies each rank's tensor to the root, into a separate tensor for each sender."""
        source, is_root = single(inputs, "gather"), opts.rootRank == self.rank()
        targets = list(outputs[0]) if is_root and outputs else []
        if is_root:
            require_equal(targets, source, self.size(), "the output of gather")
        received = [1 if is_root else 0] * self.size()
        sent = [0] * self.size()
        sent[opts.rootRank] = 1
        store = _assign_parts(self.order.to_set(targets) if is_root else [])
        part = self._exchange(rows(source, 1), sent, received, store)
        return self.submit(self.names.collectives, [part], targets, opts)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = _FROM_RANK_0
    ) -> Work:
        """Copies a different tensor of the root to each rank."""
        output, is_root = single(outputs, "scatter"), opts.rootRank == self.rank()
        sources = list(inputs[0]) if is_root and inputs else []
        if is_root:
            require_equal(sources, output, self.size(), "the input of scatter")
            mine = rows(joined(self.order.to_set(sources)), self.size())
        else:
            mine = view(output.new_empty((0, output.numel())))
        received = [0] * self.size()
        received[opts.rootRank] = 1
        sent = [1 if is_root else 0] * self.size()
        part = self._offering(self._exchange(mine, sent, received, _assign_all(output)), output)
        return self.submit(self.names.collectives, [part], [output], opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Copies a different tensor from each rank to each rank."""
        for what, tensors in (("input", inputs), ("output", outputs)):
            if len(tensors) != self.size():
                raise ValueError(
                    f"the {what} of all_to_all has {len(tensors)} tensors, but the group has {self.size()} "
                    "ranks"
                )
        require_alike([*inputs, *outputs])
        sent, received = [tensor.numel() for tensor in inputs], [output.numel() for output in outputs]
        source, store = joined(self.order.to_set(inputs)), _assign_parts(self.order.to_set(outputs))
        part = self._exchange(view(source), sent, received, store)
        return self.submit(self.names.collectives, [part], outputs, opts)

    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Copies rows of a tensor of each rank to each rank; without splits, as many to each."""
        require_alike([source, output])
        sent = self._splits(source, input_splits, "input")
        received = self._splits(output, output_splits, "output")
        mine, store = source, self._assign_in_order(output, _elements(output, received))
        if not self.order.is_ascending:
            mine = self.order.parts_to_set(source, _elements(source, sent))
        part = self._offering(self._exchange(rows(mine, sum(sent)), sent, received, store), output)
        return self.submit(self.names.collectives, [part], [output], opts)

    all_to_all_single = alltoall_base  # its newer name

    def _splits(self, tensor: Tensor, splits: Sequence[int], what: str) -> list[int]:
        """Returns the rows for each rank. Raises ValueError if they are not the rows of the tensor."""
        count = tensor.shape[0] if tensor.dim() else 0
        if not tensor.dim():
            raise ValueError(f"the {what} of all_to_all_single has no dimension to divide")
        if not splits:
            if count % self.size():
                raise ValueError(
                    f"the {what} of all_to_all_single has {count} rows, which {self.size()} ranks cannot "
                    f"divide evenly: pass {what}_split_sizes"
                )
            return [count // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != count or min(splits) < 0:
            raise ValueError(
                f"{what}_split_sizes is {list(splits)}, but it has to be one number for each of the "
                f"{self.size()} ranks, {count} together"
            )
        return list(splits)

    def _exchange(
        self,
        source: TensorView,
        sent: Sequence[int],
        received: Sequence[int],
        store: Callable[[Context, Batch, int], None],
    ) -> RequestPart:
        """Describes an all-to-all of rows that raises MismatchError if received row counts are unexpected.

        The numbers are for each rank of the group; the rows are in the order of the process set.
        """
        room = self.order.to_set(received)

        def store_if_expected(context: Context, batch: Batch, index: int) -> None:
            found = context.received_splits(batch, index)
            for sender, count, expected in zip(self.order.ascending, found, room, strict=True):
                if count != expected:
                    raise MismatchError(
                        f"rank {context.rank} received {count} rows from rank {sender}, but has room for "
                        f"{expected}: the ranks disagree about the sizes, or about the root"
                    )
            store(context, batch, index)

        return RequestPart(
            core.ALLTOALL, source, store=store_if_expected, splits=list(self.order.to_set(sent))
        )

    def _assign_in_order(
        self, output: Tensor, counts: Sequence[int]
    ) -> Callable[[Context, Batch, int], None]:
        """Returns a function that stores all ranks' elements, `counts` by rank, in a single output."""
        if self.order.is_ascending:
            return _assign_all(output)
        refuse_overlap(output)

        def store(context: Context, batch: Batch, index: int) -> None:
            assign(output, self.order.parts_from_set(from_output(context, batch, index), counts))

        return store

    def _offering(self, part: RequestPart, output: Tensor) -> RequestPart:
        """Offers the memory of a tensor for the result, which saves a copy.

        The core writes rows in the order of the process set, to memory without gaps.
        """
        is_plain = output.is_contiguous() and not (output.is_conj() or output.is_neg())
        if is_plain and self.order.is_ascending:
            part.target, part.keep = output.data_ptr(), output
            part.room = output.numel() * output.element_size()
        return part


def require_alike(tensors: Sequence[Tensor]) -> None:
    """Raises ValueError if the dtypes or the devices of tensors differ."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"all tensors of a call have to be on one device, not {sorted(map(str, devices))}")
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(f"all tensors of a call have to have one dtype, not {sorted(map(str, dtypes))}")


def _elements(tensor: Tensor, splits: Sequence[int]) -> list[int]:
    """Returns the number of elements in rows of a tensor."""
    per_row = tensor.numel() // max(tensor.shape[0], 1)
    return [count * per_row for count in splits]


def _assign_all(output: Tensor) -> Callable[[Context, Batch, int], None]:
    refuse_overlap(output)

    def store(context: Context, batch: Batch, index: int) -> None:
        if context.is_in_place(batch, index):
            written(output, output)
        else:
            assign(output, from_output(context, batch, index))

    return store


def _assign_parts(outputs: Sequence[Tensor]) -> Callable[[Context, Batch, int], None]:
    """Returns a function that stores elements in outputs of any sizes, in their order.

    A rank that receives nothing has no outputs.
    """
    for output in outputs:
        refuse_overlap(output)

    def store(context: Context, batch: Batch, index: int) -> None:
        elements = from_output(context, batch, index).reshape(-1)
        parts = elements.split([output.numel() for output in outputs])
        for output, part in zip(outputs, parts, strict=True):
            assign(output, part)

    return store


# ---- The operations of a process group that reduce tensors ---------------------------------------------


_SUM = ReduceOptions()  # a sum, to rank 0


class Reducing(Submission):
    """All-reduces, reduces and reduce-scatters."""

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = _SUM) -> Work:
        """Combines a tensor over all ranks, in place."""
        return self.allreduce_coalesced([single(tensors, "all_reduce")], opts)

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
        return self.reduce_scatter_tensor_coalesced([output], [source], opts)

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
