"""The call `sirtaki.spark.run`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sirtaki.runner.engines.places import EngineJob
from sirtaki.runner.function.arguments import checked_call, checked_variables, refuse_inside_a_rank
from sirtaki.runner.function.call import pickle_call
from sirtaki.runner.function.errors import RunError
from sirtaki.runner.rendezvous.interfaces import VARIABLE as INTERFACES
from sirtaki.spark.job import SparkJob

_START_SECONDS = "600"
_START_VARIABLE = "HOROVOD_SPARK_START_TIMEOUT"


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on every rank, each a task of the active Spark session; returns by rank.

    The parameters are those of `horovod.spark.run`, in its order. docs/spark.md describes them.

    Args:
        fn: a function, also one of a script or a notebook; a lambda; or another callable object.
        args, kwargs: its arguments, the same on every rank.
        num_proc: the number of ranks; one per slot of Spark by default.
        start_timeout: seconds until all tasks run, and that a rank waits in hvd.init() for the others (600,
            or HOROVOD_SPARK_START_TIMEOUT).
        env: variables of the ranks' environment, in addition; they are restored when the function ends.
        nics: the only network interfaces that ranks use to reach each other.
        stdout, stderr, prefix_output_with_timestamp: have no meaning here; the logs of Spark's executors have
            the output of the ranks.
        executable: has no meaning here; PYSPARK_PYTHON names the Python of Spark's workers.
        use_mpi, use_gloo, extra_mpi_args, verbose: have no meaning here.

    Raises:
        The exception that `fn` has raised on the rank that failed first; its `__cause__` is a RemoteError
        with the rank, the host and the traceback there.
        RemoteError: that exception cannot be pickled.
        RunError: there is no session, the tasks did not start, or a task was lost.
        ValueError, TypeError: an argument is wrong, or cannot be sent.
    """
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other, and neither has a meaning here")
    refuse_inside_a_rank("sirtaki.spark.run")
    call = checked_call(fn, args, kwargs, "fn")
    variables = {INTERFACES: ",".join(nics)} if nics else {}
    variables |= checked_variables(env)
    seconds = _seconds(start_timeout)
    context = _active_context()
    size = slots_of(context) if num_proc is None else _checked_size(num_proc)
    pickled = pickle_call(*call)
    wait_for_slots(context, size, seconds)
    job = EngineJob.create("spark", size, seconds, is_local=is_local(context))
    return SparkJob(context, job, pickled, variables).run()


def _active_context() -> Any:
    from pyspark import SparkContext
    from pyspark.sql.utils import is_remote

    if is_remote():
        raise RunError(
            "sirtaki.spark.run needs a classic session, and this is one of Spark Connect, which has no RDDs: "
            "start the driver with spark-submit, or with SparkSession.builder.master(...)"
        )
    context = SparkContext._active_spark_context
    if context is None:
        raise RunError(
            "there is no active Spark session in this process: call SparkSession.builder.getOrCreate() before"
        )
    return context


def _checked_size(num_proc: object) -> int:
    if not isinstance(num_proc, int) or isinstance(num_proc, bool):
        raise TypeError(f"num_proc has to be a whole number, not {num_proc!r}")
    if num_proc < 1:
        raise ValueError(f"num_proc is {num_proc}, but there has to be at least one rank")
    return num_proc


def _seconds(start_timeout: object) -> float:
    value = os.environ.get(_START_VARIABLE, _START_SECONDS) if start_timeout is None else start_timeout
    name = _START_VARIABLE if start_timeout is None else "start_timeout"
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name} has to be a number of seconds, not {value!r}") from None
    if not seconds > 0:
        raise ValueError(f"{name} is {value!r}, but it has to be more than 0 seconds")
    return seconds


# ---- The number of tasks that Spark can run at the same time -------------------------------------------

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
