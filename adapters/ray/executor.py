"""`RayExecutor`, with Horovod's calls: ranks in actors that live from `start` to `shutdown`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import remove_placement_group

from sirtaki.bindings.bootstrap.connection.address import VARIABLE as INTERFACES
from sirtaki.bindings.bootstrap.providers.world import DEFAULT_START_TIMEOUT
from sirtaki.ray.actor import RankActor
from sirtaki.ray.elastic import ActorJob, Work
from sirtaki.ray.settings import ExecutorSettings, Shape, rules_of, shape_of
from sirtaki.runner.elastic.arbiter.model import Rules
from sirtaki.runner.engines.outcomes import RankOutcome, results_of
from sirtaki.runner.engines.places import EngineJob, ranks_by_host
from sirtaki.runner.function.api import (
    CheckedCall,
    checked_call,
    checked_variables,
    refuse_inside_a_rank,
)
from sirtaki.runner.function.call import pickle_call
from sirtaki.runner.function.errors import RunError

_NOT_STARTED = "this executor has no actors: call start() before"


class RayExecutor:
    """Ranks in actors of Ray. docs/operations/ray.md describes it.

    Args:
        settings: made by `create_settings`.
        num_workers: the number of ranks, on any hosts; or
        num_hosts, num_workers_per_host: ranks on different hosts, the same number on each.
        cpus_per_worker: processors that Ray reserves for each rank.
        use_gpu: whether each rank has a GPU.
        gpus_per_worker: the number of GPUs of each rank, if not 1.
        use_current_placement_group: whether to use the placement group of the caller, if there is one.
        min_workers: makes the executor elastic: a call goes on while there are so many ranks.
        max_workers: ranks join up to so many (those of the start, which are num_workers or min_workers).
        reset_limit: losses that a call survives.
        cooldown_range: the shortest and the longest pause before a place is used again, in seconds.
        elastic_timeout: seconds that a call waits for enough ranks.
        override_discovery: has to be true: Ray tells which nodes have room.
    """

    def __init__(
        self,
        settings: ExecutorSettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_worker and not use_gpu:
            raise ValueError(f"gpus_per_worker is {gpus_per_worker} without use_gpu=True")
        gpus = (1 if gpus_per_worker is None else gpus_per_worker) if use_gpu else 0
        self._settings = settings or self.create_settings()
        self._rules: Rules | None = None
        if any(limit is not None for limit in (min_workers, max_workers, reset_limit, cooldown_range)):
            if num_hosts is not None or not override_discovery:
                raise ValueError("an elastic executor takes no num_hosts, and no discovery of its own")
            self._rules = rules_of(
                num_workers, min_workers, max_workers, elastic_timeout, reset_limit, cooldown_range
            )
            num_workers = self._rules.maximum
        self._shape = shape_of(num_workers, num_hosts, num_workers_per_host, cpus_per_worker, gpus)
        self._variables: Mapping[str, str] = {}
        self._executable = b""  # pickled, once an elastic executor has started
        self._uses_current_group = use_current_placement_group
        self._group: RankGroup | None = None

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = DEFAULT_START_TIMEOUT,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Sequence[str] | None = None,
    ) -> ExecutorSettings:
        """Returns settings. Nothing here uses ssh, so `ssh_identity_file` and `ssh_str` have no meaning."""
        return ExecutorSettings(timeout_s, placement_group_timeout_s, tuple(sorted(nics or ())))

    @property
    def num_workers(self) -> int:
        """Returns the number of ranks; of an elastic executor, that at the start of a call."""
        return self._shape.workers if self._rules is None else self._rules.start

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the actors, and in each an object of `executable_cls`, if given, for `execute`.

        `extra_env_vars` are variables of their environment from the beginning of the process.

        Raises:
            RunError: Ray is not initialised, has no room, or an actor was lost.
            An exception that the class has raised.
        """
        refuse_inside_a_rank("RayExecutor.start")
        if not ray.is_initialized():
            raise RunError(
                "Ray is not initialised in this process: call ray.init() before RayExecutor.start()"
            )
        if self._group is not None or self._executable:
            raise RunError("this executor has been started already: call shutdown() before it starts again")
        variables = checked_variables(extra_env_vars)
        if self._settings.nics:
            variables.setdefault(INTERFACES, ",".join(self._settings.nics))
        call = checked_call(
            executable_cls or _nothing, executable_args or (), executable_kwargs, "executable_cls"
        )
        pickled = pickle_call(*call)
        if self._rules is not None:
            self._variables, self._executable = variables, pickled
            return
        self._group = RankGroup(self._settings, self._shape, self._uses_current_group, variables)
        try:
            self._group.start()
            self._group.outcomes_of(lambda actor: actor.make_executable.remote(pickled))
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every rank; returns the results by rank.

        Raises:
            The exception that `fn` has raised on the rank that failed first; its `__cause__` is a
            RemoteError.
            RemoteError: that exception cannot be pickled.
            RunError: an actor was lost; the text names it.
        """
        pickled = pickle_call(*_checked(fn, args, kwargs, callbacks))
        if self._rules is not None:
            return self._run_elastic(self._rules, pickled, gives_executable=False)
        return self._started().outcomes_of(lambda actor: actor.call.remote(pickled, False))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Begins to call `fn(*args, **kwargs)` on every rank; returns references to the results by rank."""
        call = _checked(fn, args, kwargs, callbacks)
        if self._rules is not None:
            raise ValueError("an elastic executor has no run_remote, because its actors may change: use run")
        return self._started().references_of(lambda actor: actor.call_for_result.remote(*call))

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> list[Any]:
        """Calls `fn(executable)` on every rank; returns the results by rank. Raises as `run`.

        The executable is the object of the class that `start` was given, or None.
        """
        pickled = pickle_call(*_checked(fn, None, None, callbacks))
        if self._rules is not None:
            return self._run_elastic(self._rules, pickled, gives_executable=True)
        return self._started().outcomes_of(lambda actor: actor.call.remote(pickled, True))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0 alone, and returns its result. Raises as `run`."""
        pickled = pickle_call(*_checked(fn, None, None, None))
        if self._rules is not None:
            raise ValueError("an elastic executor has no execute_single: its rank 0 may change; use execute")
        (result,) = self._started().outcomes_of(
            lambda actor: actor.call.remote(pickled, True), only_first=True
        )
        return result

    def shutdown(self) -> None:
        """Ends the actors, and gives their resources back. A second call does nothing."""
        group, self._group = self._group, None
        self._executable = b""
        if group is not None:
            group.shutdown()

    def _run_elastic(self, rules: Rules, pickled: bytes, gives_executable: bool) -> list[Any]:
        if not self._executable:
            raise RunError(_NOT_STARTED)
        work = Work(self._executable, pickled, gives_executable)
        return ActorJob(self._settings, self._shape, rules, self._variables, work).run()

    def _started(self) -> RankGroup:
        if self._group is None:
            raise RunError(_NOT_STARTED)
        return self._group


def _nothing() -> None:
    """Is the executable of an executor without a class."""


def _checked(fn: Any, args: Any, kwargs: Any, callbacks: Any) -> CheckedCall:
    if callbacks:
        raise ValueError(
            "callbacks are not served: let the function print, log or return what the caller needs to know"
        )
    return checked_call(fn, () if args is None else args, kwargs, "fn")


# ---- The actors of an executor: started, made ranks, called together, and ended ------------------------


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
    """The actors of an executor, in the order of their ranks once they have started."""

    def __init__(
        self, settings: ExecutorSettings, shape: Shape, uses_current_group: bool, variables: Mapping[str, str]
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
        for place, description in zip(self._ranks, descriptions, strict=True):
            place.host, place.hostname, place.pid = description
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
        """Ends the actors; idle actors leave their world before."""
        leaving = []
        with contextlib.suppress(RayError):
            leaving = [rank.actor.leave.remote() for rank in self._ranks]
        if leaving and not self._lost:
            ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_SECONDS)
        for place in self._ranks:
            ray.kill(place.actor)
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
        entering = [place.actor.enter.remote(job, rank, address) for rank, place in enumerate(self._ranks)]
        self._get(entering, seconds)

    def _new_job(self) -> EngineJob:
        return EngineJob.create("ray", self._shape.workers, self._settings.timeout_s)

    def _get(self, references: list[Any], seconds: float | None) -> list[Any]:
        """Returns the values of a reference from each actor, by rank. Raises RunError."""
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
        """Collects outcomes, and removes their references. Gives up some time after the first failure."""
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
        rank = self._ranks[number]
        where = (
            f" (actor {rank.name}, pid {rank.pid} on {rank.hostname})"
            if rank.pid
            else f" (actor {rank.name})"
        )
        self._lost = self._lost or f"rank {number}{where} was lost: {reason}"
