"""The driver's side of a job: a barrier stage in a thread, and what becomes of it."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark import BarrierTaskContext, InheritableThread
from pyspark.accumulators import AccumulatorParam

from sirtaki.runner.engines.outcomes import RankOutcome, call_on_rank, results_of, with_variables
from sirtaki.runner.engines.places import EngineJob, ranks_by_host
from sirtaki.runner.function.errors import RunError
from sirtaki.runner.rendezvous import lifecycle
from sirtaki.runner.rendezvous.identity import host_identity
from sirtaki.runner.rendezvous.providers import world

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # after the first failure, for the other ranks to end by themselves
_END_SECONDS = 30.0  # for Spark to end a job that was cancelled
_LOST_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")


class SparkJob:
    """One job: each rank is a task of one barrier stage."""

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
        """Waits until Spark has started all tasks, which it does at the same time."""
        while self._thread.is_alive() and (started := self._started_tasks()) < self._job.size:
            if time.monotonic() > deadline:
                tasks, seconds = f"{started} of {self._job.size} tasks", f"{self._job.start_timeout:g} s"
                raise RunError(
                    f"Spark has started {tasks} within {seconds} (start_timeout): other jobs may use slots"
                )
            self._thread.join(_POLL_SECONDS)

    def _wait_for_end(self) -> None:
        """Waits until the job has ended; ends it some time after a rank has failed."""
        while self._thread.is_alive() and not self._failures.value:
            self._thread.join(_POLL_SECONDS)
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
