"""The call `sirtaki.spark.run`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import BarrierTaskContext, InheritableThread
from pyspark.accumulators import AccumulatorParam

from sirtaki.bindings.bootstrap import lifecycle
from sirtaki.bindings.bootstrap.connection.address import VARIABLE as INTERFACES
from sirtaki.bindings.bootstrap.connection.address import host_identity
from sirtaki.bindings.bootstrap.providers import world
from sirtaki.runner.engines.outcomes import RankOutcome, call_on_rank, results_of, with_variables
from sirtaki.runner.engines.places import EngineJob, ranks_by_host
from sirtaki.runner.function.api import checked_call, checked_variables, refuse_inside_a_rank
from sirtaki.runner.function.call import pickle_call
from sirtaki.runner.function.errors import RunError

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

    The parameters are those of `horovod.spark.run`, in its order. docs/operations/spark.md describes them.

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


# ---- The driver's side of a job: a barrier stage in a thread, and what becomes of it -------------------


_STATE_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # after the first failure, for the other ranks to end by themselves
_END_SECONDS = 30.0  # for Spark to end a job that was cancelled
_LOST_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")


class SparkJob:
    """A Spark job: each rank is a task of a single barrier stage."""

    def __init__(self, context: Any, job: EngineJob, call: bytes, variables: Mapping[str, str]) -> None:
        self._context = context
        self._job = job
        self._tag = f"sirtaki-{secrets.token_hex(8)}"
        self._failures = context.accumulator([], Appending())
        self._task = RankTask(job, call, variables, self._failures)
        self._outcomes: list[RankOutcome] | None = None
        self._error: Exception | None = None  # raised by Spark
        self._was_cancelled = False
        # Jobs of a thread have its tags and its scheduler pool; other jobs may run at the same time.
        self._thread = InheritableThread(target=self._collect, name="sirtaki spark job", daemon=True)

    def run(self) -> list[Any]:
        """Returns the results, by rank. Raises the exception of the rank that failed first, or RunError."""
        self._thread.start()
        try:
            self._wait_for_start(time.monotonic() + self._job.start_timeout)
            self._wait_for_end()
        except BaseException:
            self._cancel()
            raise
        if self._outcomes is not None:
            return results_of(self._outcomes)
        lost = "" if self._was_cancelled and self._failures.value else self._describe_end()
        return results_of(self._failures.value, lost)

    def _collect(self) -> None:
        try:
            self._context.addJobTag(self._tag)
            size = self._job.size
            tasks = self._context.parallelize(range(size), size).barrier()
            self._outcomes = tasks.mapPartitions(self._task).collect()
        except Exception as error:
            self._error = error

    def _wait_for_start(self, deadline: float) -> None:
        """Waits until Spark has started all tasks; Spark starts them at the same time."""
        while self._thread.is_alive() and (started := self._started_tasks()) < self._job.size:
            if time.monotonic() > deadline:
                tasks, seconds = f"{started} of {self._job.size} tasks", f"{self._job.start_timeout:g} s"
                raise RunError(
                    f"Spark has started {tasks} within {seconds} (start_timeout): other jobs may use slots"
                )
            self._thread.join(_STATE_SECONDS)

    def _wait_for_end(self) -> None:
        """Waits until the job has ended; ends it some time after a rank has failed."""
        while self._thread.is_alive() and not self._failures.value:
            self._thread.join(_STATE_SECONDS)
        self._thread.join(_GRACE_SECONDS if self._thread.is_alive() else None)
        if self._thread.is_alive():
            self._cancel()

    def _cancel(self) -> None:
        self._was_cancelled = True
        self._context.cancelJobsWithTag(self._tag)
        self._thread.join(_END_SECONDS)

    def _started_tasks(self) -> int:
        """Returns the number of tasks that run or have ended."""
        tracker = self._context.statusTracker()
        # Spark's calls for Python find jobs by groups only, and the group of a job is the user's.
        jobs = self._context._jsc.sc().statusTracker().getJobIdsForTag(self._tag)
        stages = [stage for job in jobs if (found := tracker.getJobInfo(job)) for stage in found.stageIds]
        infos = [info for stage in stages if (info := tracker.getStageInfo(stage))]
        return sum(info.numActiveTasks + info.numCompletedTasks + info.numFailedTasks for info in infos)

    def _describe_end(self) -> str:
        """Returns Spark's report of the end of the job, without the frames of its own program."""
        lines = [line for line in str(self._error).splitlines() if line.strip()]
        shown = [
            line
            for line in lines
            if not re.match(r"\s+(at |\.\.\. \d+ more)|An error occurred while calling", line)
        ]
        report = "\n".join(shown).removeprefix(": ")
        lost = _LOST_TASK.search(report)
        if lost is None:
            return f"Spark has ended the job: {report}"
        what = f"rank {lost[1]}" if self._job.is_local else f"the task of partition {lost[1]}"
        return f"{what} was lost, and Spark has ended the job: {report}"


# ---- A rank's side: a task of a barrier stage ----------------------------------------------------------


class Appending(AccumulatorParam):
    """Collects lists: Spark brings what a task has added to the driver when that task ends."""

    def zero(self, value: list[Any]) -> list[Any]:
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:  # noqa: N802  # Spark's name
        return value1 + value2


@dataclass(frozen=True)
class RankTask:
    """The function of each task. It travels in the closure of the job, with the job's key.

    Attributes:
        job: the properties of the job.
        call: the pickled function and its arguments.
        variables: of the rank's environment.
        failures: an accumulator of the outcomes that are exceptions. Results of tasks reach the driver when
            all tasks have ended, and some may not end once a rank has failed.
    """

    job: EngineJob
    call: bytes
    variables: Mapping[str, str]
    failures: Any

    def __call__(self, partition: Iterator[Any]) -> list[RankOutcome]:
        """Takes part in the job; the outcome is the only element of the partition."""
        context = BarrierTaskContext.get()
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(with_variables(self.variables))
            lifecycle.forget()  # Spark uses a process for several jobs
            cleanup.callback(world.assign, None)
            address = ""
            if context.partitionId() == 0:
                server = cleanup.enter_context(contextlib.closing(self.job.serve()))
                address = server.address
            cleanup.callback(lifecycle.forget)
            rank = self._meet(context, address)
            outcome = call_on_rank(self.call, rank)
        if not outcome.has_returned:
            self.failures.add([outcome])
        return [outcome]

    def _meet(self, context: Any, address: str) -> int:
        """Exchanges hosts and the address of the rendezvous; assigns the world, and returns this rank."""
        gathered = [json.loads(text) for text in context.allGather(json.dumps([host_identity(), address]))]
        rank = ranks_by_host([host for host, _ in gathered])[context.partitionId()]
        world.assign(self.job.world(rank, gathered[0][1]))
        return rank
