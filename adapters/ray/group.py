"""The actors of an executor: started, made ranks, called together, and ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import remove_placement_group

from sirtaki.ray.actor import RankActor
from sirtaki.ray.settings import Settings, Shape
from sirtaki.runner.engines.outcomes import RankOutcome, results_of
from sirtaki.runner.engines.places import EngineJob, ranks_by_host
from sirtaki.runner.function.errors import RunError

_GRACE_SECONDS = 5.0  # after the first failure, for the other ranks to end by themselves
_LEAVE_SECONDS = 10.0


@dataclass
class _Rank:
    """An actor, and how it is known: to Ray by a name, to its host by a process."""

    actor: Any
    name: str
    host: str = ""
    hostname: str = ""
    pid: int = 0


class RankGroup:
    """The actors of one executor, in the order of their ranks once they have started."""

    def __init__(
        self, settings: Settings, shape: Shape, uses_current_group: bool, variables: Mapping[str, str]
    ) -> None:
        self._settings = settings
        self._shape = shape
        self._uses_current_group = uses_current_group
        self._variables = dict(variables)
        self._placement: Any = None
        self._ranks: list[_Rank] = []
        self._lost = ""  # why the group cannot be used any more

    def start(self) -> None:
        """Starts the actors, and makes them ranks. Raises RunError."""
        seconds = self._settings.placement_group_timeout_s
        strategies, self._placement = self._shape.strategies(self._uses_current_group, seconds)
        job = self._new_job()
        make = ray.remote(RankActor)
        for number, strategy in enumerate(strategies):
            name = f"sirtaki-{job.id}-{number}"
            actor = make.options(
                name=name,
                num_cpus=self._shape.cpus,
                num_gpus=self._shape.gpus,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": self._variables},
            ).remote()
            self._ranks.append(_Rank(actor, name))
        descriptions = self._get([rank.actor.describe.remote() for rank in self._ranks], seconds)
        for one, description in zip(self._ranks, descriptions, strict=True):
            one.host, one.hostname, one.pid = description
        by_rank = dict(zip(ranks_by_host([rank.host for rank in self._ranks]), self._ranks, strict=True))
        self._ranks = [by_rank[rank] for rank in range(len(by_rank))]
        self._enter(job)

    def outcomes_of(self, call: Callable[[Any], Any], only_first: bool = False) -> list[Any]:
        """Calls all actors, or that of rank 0, and returns the results. Raises as `RayExecutor.run`."""
        self._recover()
        ranks = self._ranks[:1] if only_first else self._ranks
        waiting = {call(rank.actor): number for number, rank in enumerate(ranks)}
        try:
            outcomes = self._wait_for(waiting)
        except BaseException:
            self._kill(waiting.values(), "the call was interrupted")
            raise
        lost = self._lost
        self._kill(
            waiting.values(), f"it did not end within {_GRACE_SECONDS:g} s after another one had failed"
        )
        return results_of(outcomes, lost)

    def references_of(self, call: Callable[[Any], Any]) -> list[Any]:
        """Calls all actors, and returns references to their results, by rank."""
        self._recover()
        return [call(rank.actor) for rank in self._ranks]

    def shutdown(self) -> None:
        """Ends the actors; those that are idle leave their world before."""
        leaving = []
        with contextlib.suppress(RayError):
            leaving = [rank.actor.leave.remote() for rank in self._ranks]
        if leaving and not self._lost:
            ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)
        for one in self._ranks:
            ray.kill(one.actor)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def _recover(self) -> None:
        """Makes a new job of the same actors if a call has failed: its world has ended on some of them.

        Returns when earlier calls have ended, for an actor answers in the order of its calls.
        """
        if self._lost:
            raise RunError(f"{self._lost}: call shutdown() and start() to begin again")
        if any(self._get([rank.actor.has_failed.remote() for rank in self._ranks], None)):
            self._enter(self._new_job())

    def _enter(self, job: EngineJob) -> None:
        seconds = self._settings.placement_group_timeout_s
        (address,) = self._get([self._ranks[0].actor.serve.remote(job)], seconds)
        entering = [one.actor.enter.remote(job, rank, address) for rank, one in enumerate(self._ranks)]
        self._get(entering, seconds)

    def _new_job(self) -> EngineJob:
        return EngineJob.create("ray", self._shape.workers, self._settings.timeout_s)

    def _get(self, references: list[Any], seconds: float | None) -> list[Any]:
        """Returns the values of one reference of each actor, by rank. Raises RunError."""
        deadline = None if seconds is None else time.monotonic() + seconds
        values = []
        for number, reference in enumerate(references):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                values.append(ray.get(reference, timeout=left))
            except GetTimeoutError:
                text = f"the actor {self._ranks[number].name} has not started within {seconds:g} s"
                raise RunError(f"{text} (placement_group_timeout_s); `ray status` shows why") from None
            except RayTaskError:  # the call has raised, and its actor lives
                raise
            except RayError as error:
                self._note_lost(number, str(error))
                raise RunError(self._lost) from None
        return values

    def _wait_for(self, waiting: dict[Any, int]) -> list[RankOutcome]:
        """Collects outcomes, whose references it removes. Gives up some time after the first failure."""
        outcomes: list[RankOutcome] = []
        deadline = None  # once a rank has failed
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for reference in (done := ray.wait(list(waiting), num_returns=1, timeout=left)[0]):
                number = waiting.pop(reference)
                try:
                    outcomes.append(ray.get(reference))
                except RayTaskError:  # the call has raised, and its actor lives
                    raise
                except RayError as error:  # not only RayActorError: the memory monitor has one of its own
                    self._note_lost(number, str(error))
            if not done:
                break
            if deadline is None and (self._lost or not all(outcome.has_returned for outcome in outcomes)):
                deadline = time.monotonic() + _GRACE_SECONDS
        return outcomes

    def _kill(self, numbers: Iterable[int], reason: str) -> None:
        for number in numbers:
            ray.kill(self._ranks[number].actor)
            self._note_lost(number, reason)

    def _note_lost(self, number: int, reason: str) -> None:
        one = self._ranks[number]
        where = f" (actor {one.name}, pid {one.pid} on {one.hostname})" if one.pid else f" (actor {one.name})"
        self._lost = self._lost or f"rank {number}{where} was lost: {reason}"
