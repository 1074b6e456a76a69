"""The end of a rank's data, where ranks have unequal amounts."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context, current
from sirtaki.bindings.observing import observe
from sirtaki.bindings.observing.observe import operation_counts
from sirtaki.bindings.observing.user_code import CallSite, program_sites
from sirtaki.common.ops.handles import pooled_batch, run_without_tensors
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.tensor import DTYPE_CODES

_BROADCAST = "broadcast"  # its name in core/plan/kind.h


@dataclass
class Joins:
    """The joins of a process set, as known on a rank of the set.

    Attributes:
        count: their number.
        missed: exchanges of other ranks during the last one.
        site: the program's line that has joined.
        broadcasts: of this rank until the last join.
    """

    count: int = 0
    missed: int = 0
    site: CallSite | None = None
    broadcasts: int = 0


def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """Signals that this rank has no more data, and waits until all ranks of the set have done so.

    Until then the rank takes part in the others' operations with neutral elements: zeros in sums, infinities
    in minima and maxima, ones in products, no rows in what is gathered. It cannot be the root of a broadcast,
    nor send or receive. An average still divides by the number of all ranks, or, with the setting
    join_average=contributors, by those that have not joined. All ranks of the set must call it in the end.

    Steps that the others still take do not change the parameters of a rank that has joined: broadcast them
    afterwards from the rank that joined last. A rank that has missed steps prints a warning if nothing is
    broadcast before `shutdown()` or the program's end.

    Args:
        device: the GPU on which this rank takes part, if the others' tensors are on GPUs; -1: the one that
            its own tensors have been on.
        process_set: the set in which this rank has no more data.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        ValueError: this rank does not belong to the set, or has joined it already.
        PeerLostError: a rank died.

    Example:
        for inputs, targets in loader[hvd.rank() :]:  # rank 1 has fewer batches than rank 0
            hvd.allreduce(inputs, name="inputs")
        last = hvd.join()  # the rank with the most batches
    """
    context, batch = current(), pooled_batch()
    number = process_set.number(context)
    batch.set_request(0, core.JOIN, DTYPE_CODES["uint8"], (), process_set=number, device=device)
    before = observe.tensors_of_others(context)
    last = run_without_tensors(context, batch)
    _count(context, number, observe.tensors_of_others(context) - before)
    return last


def join_count(context: Context, process_set: int) -> int:
    """Returns how often all ranks of a set, given by its number, have joined."""
    joins = context.joins.get(process_set)
    return joins.count if joins else 0


def _count(context: Context, number: int, missed: int) -> None:
    if number not in context.joins:
        context.joins[number] = Joins()
        context.shutdown_callbacks.append(lambda: _warn(context, number))
    joins: Joins = context.joins[number]
    joins.count, joins.missed, joins.broadcasts = joins.count + 1, missed, _broadcasts(context)
    joins.site = next(reversed(program_sites()), None)


def _broadcasts(context: Context) -> int:
    return sum(row["operations"] for row in operation_counts(context) if row["kind"] == _BROADCAST)


def _warn(context: Context, number: int) -> None:
    """Warns at the end of a world in which this rank has missed the last steps."""
    joins: Joins = context.joins[number]
    has_trained = context.steps.read().number > 0
    if joins.missed <= 0 or not has_trained or context.failure or _broadcasts(context) > joins.broadcasts:
        return
    sys.stderr.write(
        f"sirtaki: rank {context.rank} called hvd.join() {joins.site or ''} while other ranks still took "
        "steps, and nothing was broadcast afterwards: its parameters differ from theirs, and so does what "
        "each has saved. Broadcast the parameters from the rank that hvd.join() returns, the last one; for "
        "torch: hvd.join(model=model, optimizer=optimizer)\n"
    )
