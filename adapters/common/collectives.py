"""The forms of every collective: of one array or a group, waiting or not."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current
from sirtaki.bindings.request import ABSENT, Batch
from sirtaki.common import ops
from sirtaki.common.array_adapter import ArrayAdapter
from sirtaki.common.deadlines import Deadline, Decided, with_deadline
from sirtaki.common.handles import Handle, Operation, pooled_batch, run, start
from sirtaki.common.ops import Call, reduction
from sirtaki.common.process_sets import ProcessSet
from sirtaki.common.repeated import cache_described, run_repeated
from sirtaki.common.requests import ALLREDUCE_IN_PLACE, Collective, CollectiveOptions, Preparation


class Collectives:
    """The collectives of one library's arrays.

    `single`, `group` and `named` prepare an operation for any context; the other methods run it on the
    calling code's context, or start it there and return a handle.
    """

    def __init__(self, adapter: ArrayAdapter) -> None:
        self._adapter = adapter

    def single(
        self, context: Context, collective: Collective, tensor: Any, options: CollectiveOptions
    ) -> Operation[Any]:
        """Prepares an operation on one array."""
        batch = pooled_batch()
        prepared = Preparation(self._adapter, context, batch, options)
        call = Call(options.name, options.process_set.number(context))
        keepalive, finish = collective.describe(prepared, tensor, call, 0)
        return Operation(batch, keepalive, finish, self._adapter.streams)

    def group(
        self, context: Context, collective: Collective, tensors: Sequence[Any], options: CollectiveOptions
    ) -> Operation[list[Any]]:
        """Prepares operations that complete together."""
        calls = ops.group_calls(context, collective.kind, options.name, options.process_set, len(tensors))
        return self.named(context, collective, tensors, options, calls)

    def named(
        self,
        context: Context,
        collective: Collective,
        tensors: Sequence[Any],
        options: CollectiveOptions,
        calls: Sequence[Call],
    ) -> Operation[list[Any]]:
        """Prepares operations that each have a call of their own; the options' name and set are not used."""
        batch = pooled_batch(len(tensors))
        prepared, describe = Preparation(self._adapter, context, batch, options), collective.describe
        parts = [
            describe(prepared, tensor, call, index)
            for index, (tensor, call) in enumerate(zip(tensors, calls, strict=True))
        ]
        return Operation(
            batch,
            [keepalive for keepalive, _ in parts],
            lambda *ended: [finish(*ended) for _, finish in parts],
            self._adapter.streams,
        )

    def run(self, collective: Collective, tensor: Any, options: CollectiveOptions) -> Any:
        """Returns the result of one array."""
        context = current()
        return run(context, self.single(context, collective, tensor, options))

    def run_with_deadline(self, tensor: Any, options: CollectiveOptions, deadline: Deadline) -> Decided:
        """Returns the all-reduce of one array without the ranks that are late, and its contributors."""
        context = current()
        return run(context, with_deadline(self._adapter, context, tensor, options, deadline))

    def start(self, collective: Collective, tensor: Any, options: CollectiveOptions) -> Handle[Any]:
        """Works like `run`, without waiting."""
        context = current()
        return start(context, self.single(context, collective, tensor, options))

    def run_group(
        self, collective: Collective, tensors: Sequence[Any], options: CollectiveOptions
    ) -> list[Any]:
        """Returns the results of a group."""
        context = current()
        return run(context, self.group(context, collective, tensors, options))

    def start_group(
        self, collective: Collective, tensors: Sequence[Any], options: CollectiveOptions
    ) -> Handle[list[Any]]:
        """Works like `run_group`, without waiting."""
        context = current()
        return start(context, self.group(context, collective, tensors, options))

    def allreduce_in_place(
        self,
        tensor: Any,
        name: str | None,
        op: int | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> Any:
        """All-reduces an array in place, and returns it. A call that repeats an earlier one costs less."""
        context, adapter = current(), self._adapter
        key: Any = None
        if adapter.is_plain(tensor):
            number = process_set.number(context)
            key = (name, op, prescale, postscale, number, tensor.dtype, tensor.shape)
            if run_repeated(context, key, adapter.address_of(tensor), tensor):
                return adapter.written(tensor, tensor)
        options = CollectiveOptions(name, process_set, reduction(op, None, prescale, postscale))
        result = run(context, self.single(context, ALLREDUCE_IN_PLACE, tensor, options))
        if key is not None:
            batch = Batch(1)
            prepared = Preparation(adapter, context, batch, options)
            ALLREDUCE_IN_PLACE.describe(prepared, tensor, Call(name, process_set.number(context)), 0)
            cache_described(key, batch)
        return result


def with_absent(operation: Operation[list[Any]], absent: Container[int]) -> Operation[list[Any]]:
    """Marks those of an operation's tensors that this rank has nothing for.

    Their results are None if they are absent on all ranks; otherwise they count as the operation's neutral
    element here.
    """
    batch, finish_all = operation.batch, operation.finish
    indices = [index for index in range(batch.count) if index in absent]
    for index in indices:
        batch.set_buffers(index, 0, batch.requests[index].output)
        batch.set_flags(index, ABSENT)

    def finish(context: Context, batch: Batch) -> list[Any]:
        untouched = {index for index in indices if context.untouched(batch, index)}
        results = finish_all(context, batch)
        return [None if index in untouched else result for index, result in enumerate(results)]

    operation.finish = finish
    return operation
