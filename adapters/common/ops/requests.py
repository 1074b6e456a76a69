"""The collectives, each described once for the arrays of every library."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from sirtaki.bindings import request as core
from sirtaki.bindings import variables
from sirtaki.bindings.context import Context, current
from sirtaki.bindings.library import Config, dtypes
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.handles import Operation, pooled_batch, run_without_tensors
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set, joins_of
from sirtaki.common.ops.tensor import DTYPE_CODES, ArrayAdapter, TensorView
from sirtaki.common.semantics import object_to

# Horovod's numbers.
Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

# By Horovod's number: the public name, and the core's code.
_OPS = {
    Average: ("Average", core.AVERAGE),
    Sum: ("Sum", core.SUM),
    Adasum: ("Adasum", core.ADASUM),
    Min: ("Min", core.MIN),
    Max: ("Max", core.MAX),
    Product: ("Product", core.PRODUCT),
}
OP_NAMES = {code: name for name, code in _OPS.values()}

_NAMES_BEFORE_WRAP = 1024  # so that the names of one step recur in the next ones, and are cached


class Call(NamedTuple):
    """The identity of an operation, by which the ranks match it.

    Attributes:
        name: the same on all its ranks; None to have it numbered.
        process_set: the core's number of the set; 0 is all ranks.
        group: operations that complete together: the group's number, and its number of operations.
    """

    name: str | None = None
    process_set: int = 0
    group: tuple[int, int] = (0, 0)


class Reduction(NamedTuple):
    """The combination of an all-reduce.

    Attributes:
        op: the core's operation.
        prescale, postscale: factors applied before and after it.
        wire_format: the core's code of the format in which elements are sent between ranks that share no
            memory.
    """

    op: int = core.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    wire_format: int = core.WIRE_EXACT


NO_REDUCTION = Reduction(core.SUM)  # ignored by collectives that do not combine


def reduction(
    op: int | None, average: bool | None, prescale: float = 1.0, postscale: float = 1.0
) -> Reduction:
    """Returns the reduction for Horovod's arguments: `op`, or the older `average`; Average without either.

    Raises:
        ValueError: both are given, the operation does not exist, or `average` is no truth value.
    """
    if average is not None:
        op = op_of_average(average, op)
    if op is None:
        op = Average
    known = None if isinstance(op, bool | float | str) else _OPS.get(op)
    if known is None:
        *names, last = (f"hvd.{name}" for name in OP_NAMES.values())
        raise ValueError(
            f"op is {op!r}, but it has to be one of {', '.join(names)} and {last}{_suggested_op(op)}"
        )
    return Reduction(known[1], prescale, postscale)


def op_of_average(average: bool, op: int | None) -> int:
    """Returns the operation for Horovod's older argument `average`.

    Raises ValueError if `op` is given, too, or `average` is no truth value.
    """
    _check_average(average)
    if op is not None:
        raise ValueError(
            "give either op or average, not both; average is the older way to say op=Average or op=Sum"
        )
    warnings.warn("average is deprecated: say op=Average or op=Sum", DeprecationWarning, stacklevel=4)
    return Average if average else Sum


def gradient_reduction(op: int, predivide: float) -> Reduction:
    """Returns the reduction of gradients: `predivide` divides them before an average, and multiplies it.

    Raises:
        ValueError: the operation does not exist, or the factor is not a positive number, or not 1 without
            op=Average.
    """
    how = reduction(op, None)
    if predivide == 1.0:
        return how
    if how.op != core.AVERAGE:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if not (math.isfinite(predivide) and predivide > 0):
        raise ValueError(f"gradient_predivide_factor is {predivide}, but it has to be a positive number")
    return Reduction(how.op, 1.0 / predivide, predivide)


def _check_average(average: Any) -> None:
    """Objects to anything but a truth value: a name or an op in its place would average."""
    if not isinstance(average, bool) and type(average).__name__ not in ("bool_", "bool"):
        text = (
            f"average is {average!r}, but it has to be True or False; say op=hvd.Sum or name='loss' with the "
            f"argument's name{_suggested_op(average)}"
        )
        object_to(ValueError(text))


def _suggested_op(value: Any) -> str:
    """Returns the correct spelling for an op that was given as a text."""
    known = {name.lower(): name for name in OP_NAMES.values()}
    known |= {"mean": "Average", "avg": "Average", "add": "Sum", "prod": "Product"}
    suggestion = known.get(value.lower()) if isinstance(value, str) else None
    return f": say op=hvd.{suggestion}" if suggestion else ""


def numbered_name(context: Context, kind: str, process_set: int, library: str = "") -> str:
    """Returns a name for an unnamed operation of a process set, given by its number.

    Operations of a kind are numbered per set and library; the numbers wrap around. They restart after each
    join, because until then ranks may have made different numbers of calls.
    """
    counter = f"{library}.{kind}.{process_set} after join {joins_of(context, process_set).count}"
    return f"unnamed {kind} {context.next_number(counter) % _NAMES_BEFORE_WRAP}"


@lru_cache(maxsize=1024)
def group_calls(kind: str, name: str | None, process_set: int, count: int) -> tuple[Call, ...]:
    """Returns calls of `count` operations that complete together; the same name and count on all ranks."""
    if name is None:  # the core numbers it
        return (Call(None, process_set, (0, count)),) * count
    digest = hashlib.blake2b(f"{kind}.{name}".encode(), digest_size=8).digest()
    group = (int.from_bytes(digest, "little") >> 1 | 1, count)
    return tuple(Call(f"{name}.{index}", process_set, group) for index in range(count))


def describe(
    batch: Batch,
    kind: int,
    view: TensorView,
    target: int,
    call: Call,
    index: int = 0,
    *,
    how: Reduction = NO_REDUCTION,
    root: int = 0,
    destination: int = 0,
    splits: Sequence[int] | None = None,
    priority: int = 0,
) -> None:
    """Makes request `index` a collective of the core's kind `kind`.

    Args:
        batch: the batch of the request.
        kind: core.ALLREDUCE and so on.
        view: the tensor that is sent. Has to be row-major with at least one dimension, unless the kind is an
            all-reduce, a broadcast or a send.
        target: the address of the result, which may be the view's own for these three; 0: the core allocates
            it (all-gather, all-to-all), and `Context.output` returns it. A receiver overwrites the view.
        call: the identity of the operation.
        index: the request.
        how: the combination, of those that combine.
        root: the rank of the world that sends: of a broadcast or a send.
        destination: the rank of the world that receives a send.
        splits: an all-to-all's rows for each member; None: equal parts.
        priority: higher is sent first; above 0, in parts.
    """
    batch.set_request(
        index,
        kind,
        view.dtype,
        view.shape,
        name=call.name,
        process_set=call.process_set,
        group=call.group,
        reduce_op=how.op,
        root=root,
        destination=destination,
        splits=splits,
        layout=view.layout,
        device=view.device,
        prescale=how.prescale,
        postscale=how.postscale,
        wire_format=how.wire_format,
        priority=priority,
    )
    batch.set_buffers(index, view.pointer, target)


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Returns once every rank of the process set has called it.

    Raises:
        ValueError: this rank does not belong to the set.
        PeerLostError: a rank died.

    Example:
        if hvd.is_root():
            with open("vocabulary.txt", "w") as file:
                file.write("one two three")
        hvd.barrier()  # from here on, all ranks can read the file
    """
    context, batch = current(), pooled_batch()
    number = process_set.number(context)
    batch.set_request(0, core.BARRIER, DTYPE_CODES["uint8"], (0,), name=name, process_set=number)
    run_without_tensors(context, batch)


# ---- The divisor of averaged gradients: the number of live ranks, or of ranks at the start -------------


def fixed_divisor(context: Context) -> int | None:
    """Returns the number by which averages of gradients are divided in each generation of the job.

    None: by the number of live ranks, as in other jobs. A program that is being traced may keep the result.
    """
    survivors = context.survivors
    if survivors is None:
        return None
    if context.is_provisional:
        survivors.has_averaged_early = True
        return None
    membership = survivors.membership
    return membership.initial if survivors.averages_over_initial and membership is not None else None


def averages_over_contributors(context: Context | None) -> bool:
    """Returns whether an average divides by the ranks that have not joined, not by all ranks of the set.

    Without a world, as where a function is traced before init(), that is the setting that init() will read.
    """
    setting = Config(variables.values()).get if context is None else context.setting
    return setting("join_average") == "contributors"


def gradient_sum(how: Reduction, divisor: int | None) -> Reduction:
    """Returns a reduction of gradients that divides an average by `divisor`, unless that is None."""
    if divisor is None or how.op != core.AVERAGE:
        return how
    return how._replace(op=core.SUM, prescale=how.prescale / divisor)


# ---- The collectives, each described once for the arrays of every library ------------------------------


class CollectiveOptions(NamedTuple):
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
    splits: tuple[int, ...] | None = None


def reducing_options(
    name: str | None,
    process_set: ProcessSet,
    op: int | None,
    average: bool | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> CollectiveOptions:
    """Returns the options of a collective that combines. Raises the errors of `reduction`."""
    if average is not None:
        op = op_of_average(average, op)
    try:
        return _reducing_options(name, process_set, op, prescale, postscale)
    except TypeError:  # an argument that cannot be hashed, such as an array
        return _reducing_options.__wrapped__(name, process_set, op, prescale, postscale)


@lru_cache(maxsize=1024, typed=True)
def _reducing_options(
    name: str | None, process_set: ProcessSet, op: int | None, prescale: float, postscale: float
) -> CollectiveOptions:
    return CollectiveOptions(name, process_set, reduction(op, None, prescale, postscale))


class Memory(NamedTuple):
    """The memory of a tensor in a collective.

    Attributes:
        tensor: the caller's.
        source: the array that is sent: the tensor itself, or its copy.
        result: the array of the result; None: it is the source, or the core allocates it.
    """

    tensor: Any
    source: Any
    result: Any


class Collective:
    """A collective with a new array like its source as its result; subclasses have other results.

    Attributes:
        kind: the word by which groups with a name are told apart.
        code: the core's code.
        reduces: whether it combines elements.
    """

    def __init__(self, kind: str, code: int) -> None:
        self.kind, self.code = kind, code
        self.reduces = code in (core.ALLREDUCE, core.REDUCESCATTER)

    def view(self, adapter: ArrayAdapter, tensor: Any, name: str | None) -> TensorView:
        """Returns the memory that is sent. Raises the errors of the adapter's views."""
        return adapter.reducible_view(tensor, name) if self.reduces else adapter.view(tensor, name)

    def describe(
        self,
        context: Context,
        batch: Batch,
        view: TensorView,
        call: Call,
        index: int,
        options: CollectiveOptions,
    ) -> int:
        """Describes request `index`. Returns the number of rows of the result, if it is an array of rows."""
        root, destination = self._ends(context, options)
        describe(
            batch,
            self.code,
            view,
            0,
            call,
            index,
            how=options.reduction if self.reduces else NO_REDUCTION,
            root=root,
            destination=destination,
            splits=options.splits,
        )
        return self._rows(context, view, call)

    def memory(self, adapter: ArrayAdapter, source: Any, address: int, rows: int) -> tuple[Any, int]:
        """Returns the array of the result, and its address."""
        return adapter.empty_like(source)

    def place(
        self, adapter: ArrayAdapter, batch: Batch, index: int, tensor: Any, source: Any, address: int
    ) -> Memory:
        """Writes the addresses of request `index`, which is described; returns its memory."""
        result, target = self.memory(adapter, source, address, batch.rows[index])
        batch.set_buffers(index, address, target)
        return Memory(tensor, source, result)

    def finish(
        self, adapter: ArrayAdapter, context: Context, batch: Batch, index: int, memory: Memory
    ) -> Any:
        """Returns the result of request `index`, which has ended successfully."""
        return adapter.wrapped(memory.result)

    def repeat(self, adapter: ArrayAdapter, context: Context, batch: Batch, tensor: Any) -> Any:
        """Runs a batch with the description of a single array, and returns the result."""
        memory = self.place(adapter, batch, 0, tensor, tensor, adapter.address_of(tensor))
        batch.keepalive[0] = memory
        context.run(batch)
        return self.finish(adapter, context, batch, 0, memory)

    def _ends(self, context: Context, options: CollectiveOptions) -> tuple[int, int]:
        """Returns the ranks of the world that send and receive, of a request that has them."""
        return options.root, 0

    def _rows(self, context: Context, view: TensorView, call: Call) -> int:
        return 0


class _InPlace(Collective):
    """A collective that overwrites its array."""

    def view(self, adapter: ArrayAdapter, tensor: Any, name: str | None) -> TensorView:
        return adapter.writable_view(tensor, name, self.reduces)

    def memory(self, adapter: ArrayAdapter, source: Any, address: int, rows: int) -> tuple[Any, int]:
        return None, address

    def finish(
        self, adapter: ArrayAdapter, context: Context, batch: Batch, index: int, memory: Memory
    ) -> Any:
        return adapter.written(memory.tensor, memory.source)

    def repeat(self, adapter: ArrayAdapter, context: Context, batch: Batch, tensor: Any) -> Any:
        # The quickest call of a program: the same as above without steps that are empty here.
        address = adapter.address_of(tensor)
        batch.set_buffers(0, address, address)
        batch.keepalive[0] = tensor
        context.run(batch)
        return adapter.written(tensor, tensor)


class _ReduceScatter(Collective):
    """A reduce-scatter: its result is this rank's rows."""

    def view(self, adapter: ArrayAdapter, tensor: Any, name: str | None) -> TensorView:
        return adapter.row_major_view(tensor, name)

    def memory(self, adapter: ArrayAdapter, source: Any, address: int, rows: int) -> tuple[Any, int]:
        return adapter.empty_rows_like(source, rows)

    def _rows(self, context: Context, view: TensorView, call: Call) -> int:
        return context.own_rows(call.process_set, view.shape[0]) if view.shape else 0


class _Gathering(Collective):
    """A collective with a result of any number of rows.

    The rows that it has if all ranks pass equally many are offered as memory; otherwise the core allocates
    the result, which costs more, and on a GPU has to be copied.
    """

    def view(self, adapter: ArrayAdapter, tensor: Any, name: str | None) -> TensorView:
        return adapter.row_major_view(tensor, name)

    def describe(
        self,
        context: Context,
        batch: Batch,
        view: TensorView,
        call: Call,
        index: int,
        options: CollectiveOptions,
    ) -> int:
        rows = super().describe(context, batch, view, call, index, options)
        row_bytes = prod(view.shape[1:]) * dtypes()[view.dtype].size
        if options.splits is not None or not row_bytes:
            rows = 0
        batch.offer_memory(index, rows * row_bytes)
        return rows

    def memory(self, adapter: ArrayAdapter, source: Any, address: int, rows: int) -> tuple[Any, int]:
        return adapter.empty_rows_like(source, rows) if rows else (None, 0)

    def finish(
        self, adapter: ArrayAdapter, context: Context, batch: Batch, index: int, memory: Memory
    ) -> Any:
        if memory.result is not None and context.is_in_place(batch, index):
            return adapter.wrapped(memory.result)
        return adapter.from_output(context, batch, index)

    def _rows(self, context: Context, view: TensorView, call: Call) -> int:
        if not view.shape:
            return 0
        return view.shape[0] * (len(context.members(call.process_set)) if self.code == core.ALLGATHER else 1)


class _CountedAllToAll(_Gathering):
    """An all-to-all with a pair as its result: the rows, and a list of the rows from each rank."""

    def finish(
        self, adapter: ArrayAdapter, context: Context, batch: Batch, index: int, memory: Memory
    ) -> Any:
        received = context.received_splits(batch, index)
        return super().finish(adapter, context, batch, index, memory), received


class _AllToAll(_CountedAllToAll):
    """An all-to-all; with splits, its result is a pair: the rows, and their counts as an array."""

    def finish(
        self, adapter: ArrayAdapter, context: Context, batch: Batch, index: int, memory: Memory
    ) -> Any:
        if batch.requests[index].split_count == 0:
            return _Gathering.finish(self, adapter, context, batch, index, memory)
        result, received = super().finish(adapter, context, batch, index, memory)
        return result, adapter.from_counts(received)


class _Send(Collective):
    """A message to a peer; the result is the tensor."""

    def memory(self, adapter: ArrayAdapter, source: Any, address: int, rows: int) -> tuple[Any, int]:
        return None, address

    def finish(
        self, adapter: ArrayAdapter, context: Context, batch: Batch, index: int, memory: Memory
    ) -> Any:
        return memory.tensor

    def _ends(self, context: Context, options: CollectiveOptions) -> tuple[int, int]:
        return context.rank, options.peer


class _Receive(_InPlace):
    """A message from a peer, which overwrites the array."""

    def _ends(self, context: Context, options: CollectiveOptions) -> tuple[int, int]:
        return options.peer, context.rank


ALLREDUCE = Collective("allreduce", core.ALLREDUCE)
ALLREDUCE_IN_PLACE = _InPlace("allreduce", core.ALLREDUCE)
REDUCESCATTER = _ReduceScatter("reducescatter", core.REDUCESCATTER)
ALLGATHER = _Gathering("allgather", core.ALLGATHER)
ALLTOALL = _AllToAll("alltoall", core.ALLTOALL)
COUNTED_ALLTOALL = _CountedAllToAll("alltoall", core.ALLTOALL)
BROADCAST = Collective("broadcast", core.BROADCAST)
BROADCAST_IN_PLACE = _InPlace("broadcast", core.BROADCAST)
SEND = _Send("send", core.SEND)
RECEIVE = _Receive("recv", core.SEND)

# The collectives that return new arrays, by the core's codes.
BY_KIND = {
    core.ALLREDUCE: ALLREDUCE,
    core.BROADCAST: BROADCAST,
    core.ALLGATHER: ALLGATHER,
    core.REDUCESCATTER: REDUCESCATTER,
    core.ALLTOALL: ALLTOALL,
}


# ---- All-reduces that do not wait for ranks that are late ----------------------------------------------


@dataclass(frozen=True)
class Deadline:
    """When an all-reduce is decided without the ranks that are missing.

    Attributes:
        seconds: time from the first rank's request.
        quorum: the share of the ranks that must be there, in any case.
    """

    seconds: float
    quorum: float

    def __post_init__(self) -> None:
        seconds_are_valid = _is_number(self.seconds) and 0 <= self.seconds < math.inf
        if not seconds_are_valid:
            raise ValueError(f"deadline is {self.seconds!r}, but it has to be a number of seconds, 0 or more")
        if not (_is_number(self.quorum) and 0 < self.quorum <= 1):
            raise ValueError(
                f"quorum is {self.quorum!r}, but it has to be a share of the ranks: above 0, at most 1"
            )

    def ranks(self, size: int) -> int:
        """Returns the quorum in a world of this size, as a number of ranks."""
        from fractions import Fraction  # imported late: it takes a millisecond

        return math.ceil(Fraction(str(self.quorum)) * size)


class Decided(NamedTuple):
    """The result of an all-reduce with a deadline, the same on all ranks.

    Attributes:
        tensor: the combination.
        contributors: the ranks whose data is in it, ascending.
    """

    tensor: Any
    contributors: Sequence[int]


def with_deadline(
    adapter: ArrayAdapter, context: Context, tensor: Any, options: CollectiveOptions, deadline: Deadline
) -> Operation[Decided]:
    """Prepares an all-reduce with a deadline; its result is a new array.

    Each rank's n-th call with a name belongs to round n. A rank that calls it after its round was decided
    receives that round's result.

    Raises:
        ValueError: the options have a process set.
    """
    if options.process_set is not global_process_set:
        raise ValueError("a deadline is for all ranks: leave out process_set")
    batch = pooled_batch()
    source = adapter.reducible_view(tensor, options.name)
    result, target = adapter.empty_like(source.owner)
    describe(batch, core.ALLREDUCE, source, target, Call(options.name), how=options.reduction)
    batch.set_deadline(0, deadline.seconds, deadline.ranks(context.size))

    def finish(context: Context, batch: Batch) -> Decided:
        return Decided(adapter.wrapped(result), context.contributors(batch))

    return Operation(batch, (source, result), finish, adapter.streams)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
