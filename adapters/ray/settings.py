"""The settings of an executor, and its shape: how many actors with which resources, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sirtaki.runner.elastic.arbiter.model import Rules
from sirtaki.runner.function.errors import RunError


@dataclass(frozen=True)
class ExecutorSettings:
    """The settings of an executor, which `RayExecutor.create_settings` returns.

    Attributes:
        timeout_s: seconds that a rank waits in hvd.init() for the others.
        placement_group_timeout_s: seconds until Ray has reserved the resources and started the actors.
        nics: the only network interfaces that ranks use to reach each other; none: all.
    """

    timeout_s: float
    placement_group_timeout_s: float
    nics: Sequence[str] = ()


@dataclass(frozen=True)
class Shape:
    """How many actors, and what each of them needs. `hosts` is 0 if Ray may spread them as it likes."""

    workers: int
    hosts: int
    cpus: float
    gpus: float

    def strategies(self, uses_current_group: bool, timeout: float) -> tuple[list[Any], Any]:
        """Returns how to schedule each actor, and the placement group that was made for them, or None.

        Raises RunError if Ray does not reserve the resources in time.
        """
        current = get_current_placement_group() if uses_current_group else None
        if current is not None:
            return [PlacementGroupSchedulingStrategy(placement_group=current)] * self.workers, None
        per_bundle = self.workers // self.hosts if self.hosts else 1
        bundle = self.bundle(per_bundle)
        count = self.workers // per_bundle
        group = placement_group([bundle] * count, strategy="STRICT_SPREAD" if self.hosts else "PACK")
        if not ray.wait([group.ready()], timeout=timeout)[0]:
            remove_placement_group(group)
            raise RunError(self._describe(bundle, count, timeout))
        strategies = [
            PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=worker // per_bundle
            )
            for worker in range(self.workers)
        ]
        return strategies, group

    def bundle(self, workers: int = 1) -> dict[str, float]:
        """Returns the resources of so many actors."""
        bundle = {"CPU": workers * self.cpus, "GPU": workers * self.gpus}
        return {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}

    def _describe(self, bundle: Mapping[str, float], count: int, timeout: float) -> str:
        where = " on as many hosts" if self.hosts else ""
        wanted = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        total = {name: ray.cluster_resources().get(name, 0.0) for name in bundle}
        free = {name: ray.available_resources().get(name, 0.0) for name in bundle}
        have = ", ".join(f"{free[name]:g} of {total[name]:g} {name} are free" for name in bundle)
        return (
            f"Ray has not reserved {count} times {wanted}{where} within {timeout:g} s "
            f"(placement_group_timeout_s): {have}. Use fewer workers or resources, or add nodes"
        )


def shape_of(
    num_workers: int | None,
    num_hosts: int | None,
    num_workers_per_host: int,
    cpus_per_worker: float,
    gpus_per_worker: float,
) -> Shape:
    """Returns the shape that an executor's arguments describe. Raises ValueError if they describe none."""
    if (num_workers is None) == (num_hosts is None):
        raise ValueError("RayExecutor takes either num_workers, or num_hosts with num_workers_per_host")
    counts = {
        "num_workers": num_workers,
        "num_hosts": num_hosts,
        "num_workers_per_host": num_workers_per_host,
    }
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{name} is {count!r}, but it has to be a whole number of at least 1")
    if cpus_per_worker < 0 or gpus_per_worker < 0:
        raise ValueError("cpus_per_worker and gpus_per_worker are numbers that are not negative")
    if num_hosts is not None:
        return Shape(num_hosts * num_workers_per_host, num_hosts, cpus_per_worker, gpus_per_worker)
    assert num_workers is not None
    return Shape(num_workers, 0, cpus_per_worker, gpus_per_worker)


def rules_of(
    num_workers: int | None,
    min_workers: int | None,
    max_workers: int | None,
    elastic_timeout: float,
    reset_limit: int | None,
    cooldown_range: Sequence[float] | None,
) -> Rules:
    """Returns the rules that an elastic executor's arguments describe. Raises ValueError."""
    start = num_workers or min_workers
    if start is None or min_workers is None:
        raise ValueError("an elastic executor needs min_workers, the number of ranks to go on with")
    maximum = max_workers or start
    if not 1 <= min_workers <= start <= maximum:
        raise ValueError(
            f"the ranks of the start are {start}, but they have to be from min_workers ({min_workers}) to "
            f"max_workers ({maximum}), and min_workers at least 1"
        )
    rules = Rules(start, min_workers, maximum, elastic_timeout, reset_limit, are_arguments=True)
    if cooldown_range is None:
        return rules
    shortest, longest = cooldown_range
    if not 0 < shortest <= longest:
        raise ValueError(f"cooldown_range is {cooldown_range!r}: give the shorter pause first, in seconds")
    return replace(rules, cooldown=(float(shortest), float(longest)))
