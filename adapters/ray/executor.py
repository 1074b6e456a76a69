"""`RayExecutor`, with Horovod's calls: ranks in actors that live from `start` to `shutdown`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from sirtaki.ray.group import RankGroup
from sirtaki.ray.settings import Settings, shape_of
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
        min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout, override_discovery: Horovod's
            for elastic jobs, which are not served here.
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
        if any(one is not None for one in (min_workers, max_workers, reset_limit, cooldown_range)):
            raise ValueError(
                "sirtaki.ray has no elastic executor: use num_workers, or an elastic job of hvdrun "
                "(docs/elastic.md)"
            )
        if gpus_per_worker and not use_gpu:
            raise ValueError(f"gpus_per_worker is {gpus_per_worker} without use_gpu=True")
        gpus = (1 if gpus_per_worker is None else gpus_per_worker) if use_gpu else 0
        self._settings = settings or self.create_settings()
        self._shape = shape_of(num_workers, num_hosts, num_workers_per_host, cpus_per_worker, gpus)
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
        """Returns the number of ranks."""
        return self._shape.workers

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
        if self._group is not None:
            raise RunError("this executor has been started already: call shutdown() before it starts again")
        variables = checked_variables(extra_env_vars)
        if self._settings.nics:
            variables.setdefault(INTERFACES, ",".join(self._settings.nics))
        call = checked_call(
            executable_cls or _nothing, executable_args or (), executable_kwargs, "executable_cls"
        )
        pickled = pickle_call(*call)
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
        return self._started().references_of(lambda actor: actor.call_for_result.remote(*call))

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> list[Any]:
        """Calls `fn(executable)` on every rank; returns the results by rank. Raises as `run`.

        The executable is the object of the class that `start` was given, or None.
        """
        pickled = pickle_call(*_checked(fn, None, None, callbacks))
        return self._started().outcomes_of(lambda actor: actor.call.remote(pickled, True))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Calls `fn(executable)` on rank 0 alone, and returns its result. Raises as `run`."""
        pickled = pickle_call(*_checked(fn, None, None, None))
        (result,) = self._started().outcomes_of(
            lambda actor: actor.call.remote(pickled, True), only_first=True
        )
        return result

    def shutdown(self) -> None:
        """Ends the actors, and gives their resources back. A second call does nothing."""
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()

    def _started(self) -> RankGroup:
        if self._group is None:
            raise RunError("this executor has no actors: call start() before")
        return self._group


def _nothing() -> None:
    """Is the executable of an executor without a class."""


def _checked(fn: Any, args: Any, kwargs: Any, callbacks: Any) -> CheckedCall:
    if callbacks:
        raise ValueError(
            "callbacks are not served: let the function print, log or return what the caller needs to know"
        )
    return checked_call(fn, () if args is None else args, kwargs, "fn")
