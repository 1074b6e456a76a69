"""A rank's side of the executor: an actor of Ray, which lives until the executor is shut down."""

from __future__ import annotations

import os
import socket
from typing import Any

from sirtaki.bindings.bootstrap.elastic import process as elastic
from sirtaki.bindings.bootstrap.elastic.process import Assignment
from sirtaki.ray import process
from sirtaki.runner.engines.outcomes import RankOutcome, call_on_rank, end_world
from sirtaki.runner.engines.places import EngineJob


class RankActor:
    """The process of a rank. The executor makes it an actor, and calls its methods in sequence."""

    def __init__(self) -> None:
        self._rank = -1
        self._executable: Any = None
        self._has_failed = False

    def describe(self) -> tuple[str, str, int]:
        """Returns the identity of this host, its name, and the number of this process."""
        return process.find_host(), socket.gethostname(), os.getpid()

    def serve(self, job: EngineJob) -> str:
        """Serves the rendezvous of a job; returns its address."""
        return process.serve(job)

    def enter(self, job: EngineJob, rank: int, address: str) -> None:
        """Makes this process a rank of a job; it has failed in none."""
        process.enter(job, rank, address)
        self._rank, self._has_failed = rank, False

    def has_failed(self) -> bool:
        """Returns whether a call has raised since `enter`."""
        return self._has_failed

    def make_executable(self, pickled: bytes) -> RankOutcome:
        """Makes the object that `execute` passes to functions."""

        def keep(executable: Any) -> None:
            self._executable = executable

        return self._noted(call_on_rank(pickled, self._rank, then=keep))

    def call(self, pickled_call: bytes, gives_executable: bool) -> RankOutcome:
        """Calls a function; returns its outcome."""
        first = (self._executable,) if gives_executable else ()
        return self._noted(call_on_rank(pickled_call, self._rank, first))

    def call_for_result(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function; returns its result or raises its exception, which Ray takes to the driver."""
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            self._has_failed = True
            end_world(error)
            raise

    def work(
        self, assignment: Assignment, pickled_executable: bytes, pickled_call: bytes, gives_executable: bool
    ) -> RankOutcome:
        """Calls a function as a worker of an elastic job; returns its outcome. A process works once."""
        elastic.assign(assignment)
        outcome = self.make_executable(pickled_executable)
        if outcome.has_returned:
            outcome = self.call(pickled_call, gives_executable)
        elastic.end()
        return outcome

    def leave(self) -> None:
        """Ends this process's part in its job."""
        process.leave()

    def _noted(self, outcome: RankOutcome) -> RankOutcome:
        self._has_failed |= not outcome.has_returned
        return outcome
