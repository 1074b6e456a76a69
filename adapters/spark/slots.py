"""The number of tasks that Spark can run at the same time."""

from __future__ import annotations

import time
from typing import Any

from sirtaki.runner.function.errors import RunError

_DYNAMIC = "spark.dynamicAllocation.enabled"
_POLL_SECONDS = 0.2
_UNCHANGED_SECONDS = 20.0  # executors register one after the other, seconds after the session's start


def slots_of(context: Any) -> int:
    """Returns the number of tasks that run at the same time with the executors that Spark has now.

    It is the number that Spark compares with the tasks of a barrier stage, and has no call for users.
    """
    scheduler = context._jsc.sc()
    profile = scheduler.resourceProfileManager().defaultResourceProfile()
    return int(scheduler.maxNumConcurrentTasks(profile))


def is_local(context: Any) -> bool:
    """Returns whether Spark runs tasks in the driver's own JVM, with its host and a fixed number of slots."""
    master: str = context.master
    return master == "local" or master.startswith("local[")


def wait_for_slots(context: Any, size: int, start_timeout: float) -> None:
    """Returns when there are slots for `size` tasks. Raises RunError if there will not be enough.

    Spark itself asks again for ten minutes, with a warning each time.
    """
    if not is_local(context) and context.getConf().get(_DYNAMIC, "false") == "true":
        raise RunError(
            f"Spark runs no barrier stages while it allocates executors dynamically: set {_DYNAMIC}=false"
        )
    deadline = time.monotonic() + start_timeout
    slots, since = slots_of(context), time.monotonic()
    while slots < size:
        now = time.monotonic()
        if is_local(context) or now > min(deadline, since + _UNCHANGED_SECONDS):
            raise RunError(_describe(context, slots, size))
        time.sleep(_POLL_SECONDS)
        found = slots_of(context)
        if found != slots:
            slots, since = found, time.monotonic()


def _describe(context: Any, slots: int, size: int) -> str:
    return (
        f"num_proc is {size}, but Spark has {slots} slots (master {context.master}), and ranks run at the "
        "same time: use a smaller num_proc, or give Spark more executors or cores (spark.executor.instances, "
        "spark.executor.cores, spark.task.cpus, or local[N])"
    )
