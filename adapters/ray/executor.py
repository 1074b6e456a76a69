"""`RayExecutor`, with Horovod's calls: ranks in actors that live from `start` to `shutdown`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from sirtaki.ray.elastic import ActorJob, Work
from sirtaki.ray.group import RankGroup
from sirtaki.ray.settings import Settings, rules_of, shape_of
from sirtaki.runner.elastic.rules import Rules
from sirtaki.runner.function.arguments import (
    CheckedCall,
    checked_call,
    checked_variables,
    refuse_inside_a_rank,
)
from sirtaki.runner.function.call import pickle_call
from sirtaki.runner.function.errors import RunError
from sirtaki.runner.rendezvous.interfaces import VARIABLE as INTERFACES
from sirtaki.runner.rendezvous.providers.world import DEFAULT_START_TIMEOUT

_NOT_STARTED = "this executor has no actors: call start() before"


class RayExecutor:
    """Ranks in actors of Ray. docs/ray.md describes it.

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
        settings: Settings | None = None,
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
        if any(one is not None for one in (min_workers, max_workers, reset_limit, cooldown_range)):
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
    ) -> Settings:
        """Returns settings. Nothing here uses ssh, so `ssh_identity_file` and `ssh_str` have no meaning."""
        return Settings(timeout_s, placement_group_timeout_s, tuple(sorted(nics or ())))

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
