"""A rank's side: a task of a barrier stage."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark import BarrierTaskContext
from pyspark.accumulators import AccumulatorParam

from sirtaki.runner.engines.outcomes import RankOutcome, call_on_rank, with_variables
from sirtaki.runner.engines.places import EngineJob, ranks_by_host
from sirtaki.runner.rendezvous import lifecycle
from sirtaki.runner.rendezvous.identity import host_identity
from sirtaki.runner.rendezvous.providers import assigned


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
            cleanup.callback(assigned.assign, None)
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
        assigned.assign(self.job.world(rank, gathered[0][1]))
        return rank
