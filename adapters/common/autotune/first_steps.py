"""The counters that the model of autotune reads at the ends of the first steps, on rank 0."""

from __future__ import annotations

from sirtaki.bindings.context import Context
from sirtaki.bindings.library import usable_cores
from sirtaki.bindings.observe import statistics
from sirtaki.bindings.step_counters import Stepper
from sirtaki.common.autotune.model import Counts, Job

_MOST_SETS = 64  # numbers of process sets that are looked up


def read(context: Context) -> Counts:
    """Returns the counters now. Other ranks need not call it."""
    counted = statistics(context)
    routes = {(row["kind"], row["backend"]): row["operations"] for row in counted["by_backend"]}
    return Counts(
        steps=counted["steps"]["count"],
        operations=counted["operations"],
        failed=counted["failed"],
        plans=counted["plans"],
        bytes=counted["bytes"],
        waiting=counted["waiting_seconds"],
        moving=counted["moving_seconds"],
        exposed=counted["steps"]["exposed_seconds"],
        routes=routes,
    )


def job_of(context: Context, optimizer: Stepper) -> Job | None:
    """Returns what is known of a job.

    Returns None if it has process sets: the other ranks may do something in them that rank 0 cannot count.
    """
    if any(_exists(context, number) for number in range(1, _MOST_SETS)):
        return None
    ranks, cores = context.topology.local_size, usable_cores()
    return Job(-(-ranks // cores), optimizer.operations, optimizer.bytes, optimizer.parts)


def _exists(context: Context, process_set: int) -> bool:
    try:
        return bool(context.members(process_set))
    except ValueError:
        return False
