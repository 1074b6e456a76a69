"""The collectives of a library's arrays: their preparation, and the public forms as methods.

Each public signature and docstring is defined here once. The modules of numpy and torch export the methods as
functions. Torch adds forms that compress, and records collectives of tensors that autograd tracks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from inspect import cleandoc
from types import FunctionType, MethodType
from typing import Any, Generic, ParamSpec, TypeVar, overload

from sirtaki.bindings.context import Context, current
from sirtaki.bindings.request import ABSENT, Batch
from sirtaki.common.ops.handles import (
    LARGEST_DESCRIBED,
    Handle,
    Operation,
    described,
    pooled_batch,
    recycle,
    run,
    start,
)
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_IN_PLACE,
    ALLTOALL,
    BROADCAST,
    BROADCAST_IN_PLACE,
    RECEIVE,
    REDUCESCATTER,
    SEND,
    Average,
    Call,
    Collective,
    CollectiveOptions,
    Deadline,
    Decided,
    Memory,
    group_calls,
    reducing_options,
    with_deadline,
)
from sirtaki.common.ops.tensor import ArrayAdapter

TensorLike = TypeVar("TensorLike")
Tensor = TypeVar("Tensor")
Splits = TypeVar("Splits")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Collectives:
    """The collectives of a library's arrays.

    `single`, `group` and `named` prepare an operation for any context; the other methods run it on the
    calling code's context, or start it there and return a handle.
    """

    def __init__(self, adapter: ArrayAdapter) -> None:
        self.adapter = adapter

    def single(
        self, context: Context, collective: Collective, tensor: Any, options: CollectiveOptions
    ) -> Operation[Any]:
        """Prepares an operation on a single array."""
        known = self._described(context, collective, tensor, options)
        return self._single(context, collective, tensor, options, known)

    def _single(
        self,
        context: Context,
        collective: Collective,
        tensor: Any,
        options: CollectiveOptions,
        known: tuple[Hashable | None, Batch | None],
    ) -> Operation[Any]:
        """Works like `single`, with what `_described` has returned."""
        adapter, (key, batch) = self.adapter, known
        if batch is not None:
            memory = collective.place(adapter, batch, 0, tensor, tensor, adapter.address_of(tensor))
        else:
            call = Call(options.name, options.process_set.number(context))
            batch, (memory,) = self._describe(context, collective, (tensor,), options, (call,))
            batch.key = key

        def finish(context: Context, batch: Batch) -> Any:
            return collective.finish(adapter, context, batch, 0, memory)

        return Operation(batch, memory[1:], finish, adapter.streams)

    def _described(
        self, context: Context, collective: Collective, tensor: Any, options: CollectiveOptions
    ) -> tuple[Hashable | None, Batch | None]:
        """Returns key and batch of an earlier operation like this: see `described`."""
        if not self.adapter.is_plain(tensor):
            return None, None
        number = options.process_set.number(context)
        return described(context, (collective, number, options, tensor.dtype, tensor.shape))

    def group(
        self, context: Context, collective: Collective, tensors: Sequence[Any], options: CollectiveOptions
    ) -> Operation[list[Any]]:
        """Prepares operations that complete together."""
        adapter, number, key = self.adapter, options.process_set.number(context), None
        if len(tensors) <= LARGEST_DESCRIBED and all(map(adapter.is_plain, tensors)):
            arrays = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
            key, batch = described(context, (collective, number, options, arrays))
            if batch is not None:
                memories = [
                    collective.place(adapter, batch, index, tensor, tensor, adapter.address_of(tensor))
                    for index, tensor in enumerate(tensors)
                ]
                return self._grouped(collective, batch, memories)
        calls = group_calls(collective.kind, options.name, number, len(tensors))
        operation = self.named(context, collective, tensors, options, calls)
        operation.batch.key = key
        return operation

    def named(
        self,
        context: Context,
        collective: Collective,
        tensors: Sequence[Any],
        options: CollectiveOptions,
        calls: Sequence[Call],
    ) -> Operation[list[Any]]:
        """Prepares operations that each have a call of their own; the options' name and set are not used."""
        return self._grouped(collective, *self._describe(context, collective, tensors, options, calls))

    def _grouped(
        self, collective: Collective, batch: Batch, memories: Sequence[Memory]
    ) -> Operation[list[Any]]:
        adapter = self.adapter

        def finish(context: Context, batch: Batch) -> list[Any]:
            return [
                collective.finish(adapter, context, batch, index, memory)
                for index, memory in enumerate(memories)
            ]

        return Operation(batch, [memory[1:] for memory in memories], finish, adapter.streams)

    def _describe(
        self,
        context: Context,
        collective: Collective,
        tensors: Sequence[Any],
        options: CollectiveOptions,
        calls: Sequence[Call],
    ) -> tuple[Batch, list[Memory]]:
        """Describes requests in a batch, with their memory."""
        adapter, batch, memories = self.adapter, pooled_batch(len(tensors)), []
        for index, (tensor, call) in enumerate(zip(tensors, calls, strict=True)):
            view = collective.view(adapter, tensor, call.name)
            batch.rows[index] = collective.describe(context, batch, view, call, index, options)
            memories.append(collective.place(adapter, batch, index, tensor, view.owner, view.pointer))
        return batch, memories

    def run(self, collective: Collective, tensor: Any, options: CollectiveOptions) -> Any:
        """Returns the result for a single array."""
        context = current()
        key, batch = self._described(context, collective, tensor, options)
        if batch is None:
            return run(context, self._single(context, collective, tensor, options, (key, None)))
        result = collective.repeat(self.adapter, context, batch, tensor)
        recycle(context, batch)
        return result

    def run_with_deadline(self, tensor: Any, options: CollectiveOptions, deadline: Deadline) -> Decided:
        """Returns the all-reduce of an array without the ranks that are late, and its contributors."""
        context = current()
        return run(context, with_deadline(self.adapter, context, tensor, options, deadline))

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


class ArrayCollectives(Collectives, Generic[TensorLike, Tensor, Splits]):
    """The public functions of a library, as methods. `asynchronous` makes the forms that do not wait.

    `TensorLike` is the type of inputs, `Tensor` that of results, `Splits` that of the rows for each rank. All
    ranks of the process set must call the same functions.
    """

    def __init__(self, adapter: ArrayAdapter, module: str) -> None:
        super().__init__(adapter)
        self.__module__ = module

    def __reduce__(self) -> str:
        """Has the methods pickled and copied by reference, as functions are: each module has this name."""
        return "COLLECTIVES"

    @overload
    def allreduce(
        self,
        tensor: TensorLike,
        average: bool | None = ...,
        name: str | None = ...,
        op: int | None = ...,
        prescale_factor: float = ...,
        postscale_factor: float = ...,
        process_set: ProcessSet = ...,
        deadline: None = None,
        quorum: float = ...,
    ) -> Tensor: ...

    @overload
    def allreduce(
        self,
        tensor: TensorLike,
        average: bool | None = ...,
        name: str | None = ...,
        op: int | None = ...,
        prescale_factor: float = ...,
        postscale_factor: float = ...,
        process_set: ProcessSet = ...,
        *,
        deadline: float,
        quorum: float = ...,
    ) -> tuple[Tensor, Sequence[int]]: ...

    def allreduce(
        self,
        tensor: TensorLike,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        deadline: float | None = None,
        quorum: float = 0.5,
    ) -> Any:
        """Combines an array over all ranks of the set, element by element. All of them must call it.

        Args:
            tensor: an array of any shape, the same on every rank, of a numeric dtype; bool for Min, Max and
                Product; complex for Sum and Average.
            average: the older form of op=Average (True) or op=Sum (False).
            name: identifies the operation on all ranks.
            op: Average (default), Sum, Min, Max, Product, or Adasum (floating dtypes). An integer Average
                truncates toward zero.
            prescale_factor, postscale_factor: multiply before and after the combination.
            process_set: the ranks that take part.
            deadline: seconds from the first rank's call, after which the result is made without the ranks
                that are missing; None: it waits for all. A rank's n-th call with a name belongs to round n: a
                rank that is late receives the results of the rounds that it has missed, in order.
            quorum: with a deadline, the share of the ranks that must be there in any case.

        Returns:
            A new array of the same shape, order and dtype, the same on every rank. With a deadline, a pair of
            it and the ranks that have contributed, by whose number an average divides.

        Raises:
            ValueError: op and average together, an unknown op, a dtype that the op does not support, a set
                that this rank does not belong to.
            MismatchError: ranks disagree about dtype, shape, op or factors.
            PeerLostError: a rank died.

        Example:
            mean_loss = hvd.allreduce(loss, name="loss")
            samples = hvd.allreduce(len(inputs), op=hvd.Sum)  # of all ranks: 8 on 2 ranks
        """
        options = reducing_options(name, process_set, op, average, prescale_factor, postscale_factor)
        if deadline is None:
            return self.run(ALLREDUCE, tensor, options)
        return self.run_with_deadline(tensor, options, Deadline(deadline, quorum))

    def allreduce_async(
        self,
        tensor: TensorLike,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[Tensor]:
        """Works like `allreduce`, without waiting.

        Example:
            handle = hvd.allreduce_async(tensor, name="features")
            ...  # computation in the meantime
            mean = hvd.synchronize(handle)
        """
        options = reducing_options(name, process_set, op, average, prescale_factor, postscale_factor)
        return self.start(ALLREDUCE, tensor, options)

    def allreduce_(
        self,
        tensor: Tensor,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Tensor:
        """Works like `allreduce`, into the array itself, which is returned.

        Example:
            hvd.allreduce_(tensor, op=hvd.Sum, name="histogram")  # tensor holds the sum
        """
        options = reducing_options(name, process_set, op, average, prescale_factor, postscale_factor)
        return self.run(ALLREDUCE_IN_PLACE, tensor, options)

    def grouped_allreduce(
        self,
        tensors: Sequence[TensorLike],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Tensor]:
        """Works like `allreduce`, for a list of arrays that complete together. Returns a list.

        Example:
            losses, weights = hvd.grouped_allreduce(tensors, name="metrics")
        """
        options = reducing_options(name, process_set, op, average, prescale_factor, postscale_factor)
        return self.run_group(ALLREDUCE, tensors, options)

    def grouped_allreduce_(
        self,
        tensors: Sequence[Tensor],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[Tensor]:
        """Works like `grouped_allreduce`, into the arrays themselves, which are returned.

        Example:
            hvd.grouped_allreduce_(tensors, name="gradients")  # tensors hold the averages
        """
        options = reducing_options(name, process_set, op, average, prescale_factor, postscale_factor)
        return self.run_group(ALLREDUCE_IN_PLACE, tensors, options)

    def reducescatter(
        self,
        tensor: TensorLike,
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Tensor:
        """Combines an array over all ranks of the set, and gives each its part of the rows. All must call it.

        Args:
            tensor: an array with at least one dimension, of the same shape on every rank and of a dtype as
                for `allreduce`.
            name: identifies the operation on all ranks.
            op: Average, Sum, Min, Max or Product.
            process_set: the ranks that take part.
            prescale_factor, postscale_factor: multiply before and after the combination.

        Returns:
            A new array: this rank's rows of the combination. Dimension 0 is divided in the order of ranks; if
            it does not divide evenly, the first `rows % size` ranks get one more row.

        Raises:
            ValueError: an unknown op, a dtype that the op does not support, an array without dimensions.
            MismatchError: ranks disagree about dtype, shape, op or factors.
            PeerLostError: a rank died.

        Example:
            rows = hvd.reducescatter(tensor, op=hvd.Sum)  # a row of the sum: row 0 on rank 0, row 1 on rank 1
        """
        options = reducing_options(name, process_set, op, None, prescale_factor, postscale_factor)
        return self.run(REDUCESCATTER, tensor, options)

    def grouped_reducescatter(
        self,
        tensors: Sequence[TensorLike],
        name: str | None = None,
        op: int = Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[Tensor]:
        """Works like `reducescatter`, for a list of arrays that complete together. Returns a list.

        Example:
            parts = hvd.grouped_reducescatter(tensors, op=hvd.Sum)
        """
        options = reducing_options(name, process_set, op, None, prescale_factor, postscale_factor)
        return self.run_group(REDUCESCATTER, tensors, options)

    def allgather(
        self, tensor: TensorLike, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Tensor:
        """Concatenates the ranks' rows along dimension 0, in the order of ranks. All of the set must call it.

        Args:
            tensor: an array of numpy or a dense tensor of torch, with at least one dimension and any dtype in
                the core's table. Dimension 0 may differ between ranks (and be 0), the others may not.
            name: identifies the operation on all ranks.
            process_set: the ranks that take part.

        Returns:
            A new array or tensor, the same on every rank.

        Raises:
            ValueError: no dimensions, or a set that this rank does not belong to.
            MismatchError: ranks disagree about dtype or the other dimensions.
            PeerLostError: a rank died.

        Example:
            predictions = hvd.allgather(tensor, name="predictions")  # of all ranks: 4 rows on 2 ranks
        """
        return self.run(ALLGATHER, tensor, CollectiveOptions(name, process_set))

    def grouped_allgather(
        self,
        tensors: Sequence[TensorLike],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> list[Tensor]:
        """Works like `allgather`, for a list that completes as a whole. Returns a list.

        Example:
            inputs, targets = hvd.grouped_allgather([inputs, targets])  # of all ranks: 8 rows on 2 ranks
        """
        return self.run_group(ALLGATHER, tensors, CollectiveOptions(name, process_set))

    def alltoall(
        self,
        tensor: TensorLike,
        splits: Splits | None = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Sends each rank of the set its part of the rows, and returns the rows received. All must call it.

        Args:
            tensor: an array of numpy or a dense tensor of torch, with at least one dimension, of any dtype in
                the core's table; ranks may pass different numbers of rows, but of the same shape.
            splits: the number of rows for each rank, in the order of ranks, as a list, an array of integers,
                or an int32 tensor; remaining rows are not sent. None: equal parts.
            name: identifies the operation on all ranks.
            process_set: the ranks that take part.

        Returns:
            The received rows, in the order of ranks, as a new array or tensor; with splits, a pair of it and
            the number of rows from each, as int32.

        Raises:
            ValueError: no dimensions, rows that cannot be divided evenly, splits that are negative, too many
                or too few, or whose sum exceeds the rows, or a tensor of splits that is not int32.
            MismatchError: ranks disagree about dtype or the other dimensions.
            PeerLostError: a rank died.

        Example:
            rows, counts = hvd.alltoall(tensor, splits=[1] * hvd.size())  # a row to and from each rank
        """
        counts = self.adapter.split_counts(splits)
        options = CollectiveOptions(name, process_set, splits=None if counts is None else tuple(counts))
        return self.run(ALLTOALL, tensor, options)

    def broadcast(
        self,
        tensor: TensorLike,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Tensor:
        """Copies rank `root_rank`'s elements to all ranks of the set. All of them must call it.

        Args:
            tensor: an array of numpy or a dense tensor of torch, of any dtype in the core's table, of one
                shape and dtype on all ranks.
            root_rank: the rank that is copied: a rank of the world, also within a process set.
            name: identifies the operation on all ranks.
            process_set: the ranks that take part.

        Returns:
            A new array or tensor with the root's values.

        Raises:
            ValueError: rank `root_rank` does not exist, or does not belong to the set.
            MismatchError: ranks disagree about dtype, shape or root.
            PeerLostError: a rank died.

        Example:
            tensor = hvd.broadcast(tensor, root_rank=0, name="statistics")
        """
        return self.run(BROADCAST, tensor, CollectiveOptions(name, process_set, root=root_rank))

    def broadcast_(
        self,
        tensor: Tensor,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Tensor:
        """Works like `broadcast`, into the array itself, which is returned.

        Example:
            hvd.broadcast_(tensor, root_rank=0, name="weights")  # tensor holds the weights of rank 0
        """
        return self.run(BROADCAST_IN_PLACE, tensor, CollectiveOptions(name, process_set, root=root_rank))

    def send(
        self,
        tensor: TensorLike,
        destination: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Sends an array to another rank, which has to call `recv`. Returns once it has arrived.

        Two ranks that send to each other at the same time have to use `send_async`, or one of them receives
        first.

        Args:
            tensor: an array of any dtype in the core's table.
            destination: a rank of the world.
            name: identifies the operation on both ranks; without a name they are numbered for each pair.
            process_set: a set to which both belong.

        Raises:
            ValueError: the rank is not in the set, or is this one.
            MismatchError: the two disagree about dtype or shape.
            PeerLostError: a rank died.

        Example:
            if hvd.rank() == 0:
                hvd.send(tensor, destination=1)
            elif hvd.rank() == 1:
                hvd.recv(tensor, source=0)
        """
        self.run(SEND, tensor, CollectiveOptions(name, process_set, peer=destination))

    def send_async(
        self,
        tensor: TensorLike,
        destination: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle[TensorLike]:
        """Works like `send`, without waiting; `synchronize(handle)` returns the array.

        Example:
            following, previous = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
            handle = hvd.send_async(tensor, destination=following)
            received = hvd.recv(0 * tensor, source=previous)
            hvd.synchronize(handle)
        """
        return self.start(SEND, tensor, CollectiveOptions(name, process_set, peer=destination))

    def recv(
        self,
        tensor: Tensor,
        source: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Tensor:
        """Overwrites an array with the array that rank `source` sends by `send`, and returns it.

        Args:
            tensor: an array of the shape and dtype of the sent one.
            source: a rank of the world.
            name, process_set: as for `send`.

        Raises:
            ValueError: the rank is not in the set, or is this one; a read-only array.
            MismatchError: the two disagree about dtype or shape.
            PeerLostError: a rank died.

        Example:
            if hvd.rank() == 0:
                hvd.send(tensor, destination=1)
            elif hvd.rank() == 1:
                tensor = hvd.recv(tensor, source=0)
        """
        return self.run(RECEIVE, tensor, CollectiveOptions(name, process_set, peer=source))


class AsynchronousCollectives(ArrayCollectives[TensorLike, Tensor, Splits]):
    """The same methods, which return handles instead of waiting: `asynchronous` exports them."""

    run = Collectives.start

    def run_group(self, collective: Collective, tensors: Sequence[Any], options: CollectiveOptions) -> Any:
        context = current()
        return start(context, self.group(context, collective, tensors, options))


def asynchronous(form: Callable[Arguments, Result]) -> Callable[Arguments, Handle[Result]]:
    """Returns the form of a collective that does not wait, from a method of `ArrayCollectives` that does.

    It is the same method of another object. Its own name and document are for `help()`.
    """
    method: Any = form
    waiting, collectives = method.__func__, method.__self__
    in_place = "_" if waiting.__name__.endswith("_") else ""
    name = f"{waiting.__name__.removesuffix('_')}_async{in_place}"
    starting = FunctionType(waiting.__code__, waiting.__globals__, name, waiting.__defaults__)
    result = waiting.__annotations__["return"]
    starting.__annotations__ = waiting.__annotations__ | {"return": f"Handle[{result}]"}
    starting.__doc__ = without_waiting(cleandoc(waiting.__doc__ or ""), waiting.__name__, name)
    return MethodType(starting, AsynchronousCollectives(collectives.adapter, collectives.__module__))


def without_waiting(document: str, waiting: str, starting: str) -> str:
    """Returns the docstring of the form `starting`: the example is that of `waiting`, with a handle."""
    lines = [f"Works like `{waiting}`, without waiting.", "", "Example:"]
    for line in document.partition("Example:\n")[2].splitlines():
        result, call, rest = line.partition(f"hvd.{waiting}(")
        if call:
            arguments, _, comment = rest.rpartition(")")
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}handle = hvd.{starting}({arguments})")
            line = f"{result}hvd.synchronize(handle){comment}"
        lines.append(line)
    return "\n".join(lines)


def with_absent(operation: Operation[list[Any]], absent: Container[int]) -> Operation[list[Any]]:
    """Marks the tensors of an operation, by index, to which this rank contributes nothing.

    Their results are None if they are absent on all ranks; otherwise they count as the operation's neutral
    element here.
    """
    batch, finish_all = operation.batch, operation.finish
    indices = [index for index in range(batch.count) if index in absent]
    for index in indices:
        batch.set_buffers(index, 0, batch.requests[index].output)
        batch.set_flags(index, ABSENT)
    batch.key = None  # flags are no part of a key

    def finish(context: Context, batch: Batch) -> list[Any]:
        untouched = {index for index in indices if context.untouched(batch, index)}
        results = finish_all(context, batch)
        return [None if index in untouched else result for index, result in enumerate(results)]

    operation.finish = finish
    return operation
