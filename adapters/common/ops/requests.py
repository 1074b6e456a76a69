"""The collectives, each described once for the arrays of every library.

A collective describes the request of one tensor in a batch, and returns the objects that must stay alive
until it has ended, and the function that makes its result then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import dtypes
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.reduction import NO_REDUCTION, Call, Reduction, describe
from sirtaki.common.ops.tensor import ArrayAdapter, TensorView


@dataclass(slots=True)
class CollectiveOptions:
    """The arguments of a collective besides its tensors, the same on all ranks.

    Attributes:
        name: identifies the operation on all ranks; None to have it numbered.
        process_set: the ranks that take part.
        reduction: the combination, of those that combine.
        root: the rank that a broadcast copies from.
        peer: the other rank of a send or receive.
        splits: an all-to-all's rows for each rank; None: equal parts.
    """

    name: str | None = None
    process_set: ProcessSet = global_process_set
    reduction: Reduction = NO_REDUCTION
    root: int = 0
    peer: int = 0
    splits: Sequence[int] | None = None


@dataclass(slots=True)
class Preparation:
    """The batch with the requests of a call, and the call's adapter, context and options."""

    adapter: ArrayAdapter
    context: Context
    batch: Batch
    options: CollectiveOptions


Finish = Callable[[Context, Batch], Any]
Describe = Callable[[Preparation, Any, Call, int], "tuple[Any, Finish]"]


class Collective(NamedTuple):
    """A collective: its kind, by which groups without a name are numbered, and its description."""

    kind: str
    describe: Describe


def _into_new_array(kind: int) -> Describe:
    """Returns a function that describes an all-reduce or a broadcast into a new array like its source."""
    reduces = kind == core.ALLREDUCE

    def describe_one(prep: Preparation, tensor: Any, call: Call, index: int) -> tuple[Any, Finish]:
        adapter, options = prep.adapter, prep.options
        source = adapter.reducible_view(tensor, call.name) if reduces else adapter.view(tensor, call.name)
        result, target = adapter.empty_like(source)
        describe(prep.batch, kind, source, target, call, index, how=options.reduction, root=options.root)
        return (source, result), lambda *_: adapter.wrapped(result)

    return describe_one


def _in_place(kind: int) -> Describe:
    """Describes an all-reduce or a broadcast that overwrites its array."""
    reduces = kind == core.ALLREDUCE

    def describe_one(prep: Preparation, tensor: Any, call: Call, index: int) -> tuple[Any, Finish]:
        adapter, options = prep.adapter, prep.options
        view = adapter.writable_view(tensor, call.name, reduces)
        describe(prep.batch, kind, view, view.pointer, call, index, how=options.reduction, root=options.root)
        return view, lambda *_: adapter.written(tensor, view.owner)

    return describe_one


def _reducescatter(prep: Preparation, tensor: Any, call: Call, index: int) -> tuple[Any, Finish]:
    adapter = prep.adapter
    source = adapter.row_major_view(tensor, call.name)
    rows = prep.context.own_rows(call.process_set, source.shape[0]) if source.shape else 0
    result, target = adapter.empty_rows_like(source, rows)
    describe(prep.batch, core.REDUCESCATTER, source, target, call, index, how=prep.options.reduction)
    return (source, result), lambda *_: adapter.wrapped(result)


def _allgather(prep: Preparation, tensor: Any, call: Call, index: int) -> tuple[Any, Finish]:
    source = prep.adapter.row_major_view(tensor, call.name)
    members = len(prep.context.members(call.process_set)) if source.device != core.CPU else 0
    rows = (source.shape[0] if source.shape else 1) * members
    return _with_own_result(prep, source, call, index, core.ALLGATHER, rows)


def _with_own_result(
    prep: Preparation, source: TensorView, call: Call, index: int, kind: int, offered_rows: int
) -> tuple[Any, Finish]:
    """Describes a request with a result of any number of rows, which the core allocates.

    For a GPU, memory for a number of rows is offered, if not 0: the framework has reserved nearly all of it,
    and a result of the core has to be copied.
    """
    adapter = prep.adapter
    result, target = adapter.empty_rows_like(source, offered_rows) if offered_rows else (None, 0)
    describe(prep.batch, kind, source, target, call, index)
    if offered_rows:
        row = prod(source.shape[1:]) * dtypes()[source.dtype].size
        prep.batch.offer_memory(index, offered_rows * row)

    def finish(context: Context, batch: Batch) -> Any:
        if offered_rows and context.is_in_place(batch, index):
            return adapter.wrapped(result)
        return adapter.from_output(context, batch, index)

    return (source, result), finish


def _alltoall(prep: Preparation, tensor: Any, call: Call, index: int) -> tuple[Any, Finish]:
    """Describes an all-to-all; with splits, its result is a pair: the rows, and their counts as an array."""
    if prep.options.splits is not None:
        source, finish_both = _counted_alltoall(prep, tensor, call, index)

        def finish(context: Context, batch: Batch) -> tuple[Any, Any]:
            result, received = finish_both(context, batch)
            return result, prep.adapter.from_counts(received)

        return source, finish
    source = prep.adapter.row_major_view(tensor, call.name)
    rows = source.shape[0] if source.shape and source.device != core.CPU else 0
    return _with_own_result(prep, source, call, index, core.ALLTOALL, rows)


def _counted_alltoall(prep: Preparation, tensor: Any, call: Call, index: int) -> tuple[Any, Finish]:
    """Describes an all-to-all with a pair as its result: the rows, and the number of rows from each rank."""
    adapter = prep.adapter
    source = adapter.row_major_view(tensor, call.name)
    describe(prep.batch, core.ALLTOALL, source, 0, call, index, splits=prep.options.splits)

    def finish(context: Context, batch: Batch) -> tuple[Any, list[int]]:
        received = context.received_splits(batch, index)
        return adapter.from_output(context, batch, index), received

    return source, finish


def _send(prep: Preparation, tensor: Any, call: Call, index: int) -> tuple[Any, Finish]:
    source = prep.adapter.view(tensor, call.name)
    own, peer = prep.context.rank, prep.options.peer
    describe(prep.batch, core.SEND, source, source.pointer, call, index, root=own, destination=peer)
    return source, lambda *_: tensor


def _receive(prep: Preparation, tensor: Any, call: Call, index: int) -> tuple[Any, Finish]:
    adapter = prep.adapter
    target = adapter.writable_view(tensor, call.name)
    own, peer = prep.context.rank, prep.options.peer
    describe(prep.batch, core.SEND, target, target.pointer, call, index, root=peer, destination=own)
    return target, lambda *_: adapter.written(tensor, target.owner)


ALLREDUCE = Collective("allreduce", _into_new_array(core.ALLREDUCE))
ALLREDUCE_IN_PLACE = Collective("allreduce", _in_place(core.ALLREDUCE))
REDUCESCATTER = Collective("reducescatter", _reducescatter)
ALLGATHER = Collective("allgather", _allgather)
ALLTOALL = Collective("alltoall", _alltoall)
COUNTED_ALLTOALL = Collective("alltoall", _counted_alltoall)
BROADCAST = Collective("broadcast", _into_new_array(core.BROADCAST))
BROADCAST_IN_PLACE = Collective("broadcast", _in_place(core.BROADCAST))
SEND = Collective("send", _send)
RECEIVE = Collective("recv", _receive)

# The collectives that return new arrays, by the core's codes.
BY_KIND = {
    core.ALLREDUCE: ALLREDUCE,
    core.BROADCAST: BROADCAST,
    core.ALLGATHER: ALLGATHER,
    core.REDUCESCATTER: REDUCESCATTER,
    core.ALLTOALL: ALLTOALL,
}
