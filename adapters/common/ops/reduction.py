"""Collective operations on views of memory. Adapters convert their tensors to views, and results back."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context, current
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.handles import pooled_batch, run_without_tensors
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set, join_count
from sirtaki.common.ops.tensor import DTYPE_CODES, TensorView
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
    try:
        return _reduction(op, prescale, postscale)
    except TypeError:  # a factor or an operation that cannot be hashed, such as an array
        return _reduction.__wrapped__(op, prescale, postscale)


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


@lru_cache(maxsize=1024, typed=True)
def _reduction(op: int | None, prescale: float, postscale: float) -> Reduction:
    if op is None:
        op = Average
    known = None if isinstance(op, bool | float | str) else _OPS.get(op)
    if known is None:
        *names, last = (f"hvd.{name}" for name in OP_NAMES.values())
        raise ValueError(
            f"op is {op!r}, but it has to be one of {', '.join(names)} and {last}{_suggested_op(op)}"
        )
    return Reduction(known[1], prescale, postscale)


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
    counter = f"{library}.{kind}.{process_set} after join {join_count(context, process_set)}"
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


def gradient_sum(how: Reduction, divisor: int | None) -> Reduction:
    """Returns a reduction of gradients that divides an average by `divisor`, unless that is None."""
    if divisor is None or how.op != core.AVERAGE:
        return how
    return how._replace(op=core.SUM, prescale=how.prescale / divisor)
