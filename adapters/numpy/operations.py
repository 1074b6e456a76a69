"""Collective operations on numpy arrays, ready to run or to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current
from sirtaki.bindings.request import Batch
from sirtaki.common import ops
from sirtaki.common.handles import Operation, spare_batch
from sirtaki.common.ops import Call, Reduction
from sirtaki.common.process_sets import ProcessSet
from sirtaki.common.tensor import TensorView
from sirtaki.numpy.arrays import Array, from_output, like, row_major_view, rows_like, view, writable_view

# Describes one tensor's request in a batch; returns the objects to keep alive, and the finisher.
Finish = Callable[[Context, Batch], Array]
Describe = Callable[[Batch, Any, Call, int], "tuple[Any, Finish]"]


def single(
    describe: Describe, tensor: ArrayLike, name: str | None, process_set: ProcessSet
) -> Operation[Array]:
    """Prepares an operation on one array."""
    batch = spare_batch()
    keep, finish = describe(batch, tensor, ops.call(current(), name, process_set), 0)
    return Operation(batch, keep, finish)


def grouped(
    kind: str, describe: Describe, tensors: Sequence[ArrayLike], name: str | None, process_set: ProcessSet
) -> Operation[list[Array]]:
    """Prepares operations that complete together."""
    batch = spare_batch(len(tensors))
    calls = ops.group_calls(current(), kind, name, process_set, len(tensors))
    parts = [
        describe(batch, tensor, call, index)
        for index, (tensor, call) in enumerate(zip(tensors, calls, strict=True))
    ]
    return Operation(
        batch, [keep for keep, _ in parts], lambda *ended: [finish(*ended) for _, finish in parts]
    )


def allreduce(how: Reduction) -> Describe:
    """Describes an all-reduce into new arrays."""

    def describe(batch: Batch, tensor: ArrayLike, call: Call, index: int) -> tuple[Any, Finish]:
        source = view(tensor)
        result, target = like(source)
        ops.describe_allreduce(batch, source, target, how, call, index)
        return (source, result), lambda *_: result

    return describe


def allreduce_in_place(how: Reduction) -> Describe:
    """Describes an all-reduce into the arrays themselves."""

    def describe(batch: Batch, tensor: Array, call: Call, index: int) -> tuple[Any, Finish]:
        target = writable_view(tensor)
        ops.describe_allreduce(batch, target, target.pointer, how, call, index)
        return target, lambda *_: _copied_back(tensor, target)

    return describe


def reducescatter(how: Reduction, context: Context, process_set: ProcessSet) -> Describe:
    """Describes a reduce-scatter of this rank's rows, into new arrays."""

    def describe(batch: Batch, tensor: ArrayLike, call: Call, index: int) -> tuple[Any, Finish]:
        source = row_major_view(tensor)
        rows = ops.own_rows(context, source.shape[0], process_set) if source.shape else 0
        result, target = rows_like(source, rows)
        ops.describe_reducescatter(batch, source, target, how, call, index)
        return (source, result), lambda *_: result

    return describe


def allgather(batch: Batch, tensor: ArrayLike, call: Call, index: int) -> tuple[Any, Finish]:
    """Describes an all-gather into new arrays."""
    source = row_major_view(tensor)
    ops.describe_allgather(batch, source, call, index)
    return source, lambda context, batch: from_output(context.output(batch, index))


def alltoall(
    tensor: ArrayLike, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> Operation[Any]:
    """Describes an all-to-all into a new array; with splits, also returns the rows from each rank."""
    batch, source = spare_batch(), row_major_view(tensor)
    ops.describe_alltoall(batch, source, splits, ops.call(current(), name, process_set))

    def finish(context: Context, batch: Batch) -> Any:
        received = None if splits is None else np.array(context.received_splits(batch), dtype=np.int32)
        result = from_output(context.output(batch))
        return result if received is None else (result, received)

    return Operation(batch, source, finish)


def broadcast(root: int) -> Describe:
    """Describes a broadcast into new arrays."""

    def describe(batch: Batch, tensor: ArrayLike, call: Call, index: int) -> tuple[Any, Finish]:
        source = view(tensor)
        result, target = like(source)
        ops.describe_broadcast(batch, source, target, root, call, index)
        return (source, result), lambda *_: result

    return describe


def broadcast_in_place(root: int) -> Describe:
    """Describes a broadcast into the arrays themselves."""

    def describe(batch: Batch, tensor: Array, call: Call, index: int) -> tuple[Any, Finish]:
        target = writable_view(tensor)
        ops.describe_broadcast(batch, target, target.pointer, root, call, index)
        return target, lambda *_: _copied_back(tensor, target)

    return describe


def send(ranks: tuple[int, int]) -> Describe:
    """Describes a send from an array, which is not changed."""

    def describe(batch: Batch, tensor: ArrayLike, call: Call, index: int) -> tuple[Any, Finish]:
        source = view(tensor)
        ops.describe_send(batch, source, ranks, call, index)
        return source, lambda *_: source.owner

    return describe


def receive(ranks: tuple[int, int]) -> Describe:
    """Describes a receive into an array."""

    def describe(batch: Batch, tensor: Array, call: Call, index: int) -> tuple[Any, Finish]:
        target = writable_view(tensor)
        ops.describe_send(batch, target, ranks, call, index)
        return target, lambda *_: _copied_back(tensor, target)

    return describe


def _copied_back(tensor: Array, target: TensorView) -> Array:
    if target.owner is not tensor:
        tensor[...] = target.owner
    return tensor
