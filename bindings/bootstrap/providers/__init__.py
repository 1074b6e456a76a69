"""Finds this process's position in its world: the first provider that applies determines it.

A provider supports one way of starting ranks. It only reads what the launcher has left in the environment, or
asks the launcher's own channel; it never guesses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sirtaki.bindings.bootstrap.connection.address import split_addresses
from sirtaki.bindings.bootstrap.job import Job
from sirtaki.bindings.bootstrap.providers import environment as variables
from sirtaki.bindings.bootstrap.providers.world import (
    VERSION,
    World,
    checked_key,
    find_assigned,
    key_of,
    single_rank_world,
    start_timeout,
)

__all__ = ["World", "find_world"]

_EXPLICIT_JOB = "explicit"  # the id of a job without a launcher, unless SIRTAKI_JOB gives one


def _providers() -> Iterator[Callable[[Mapping[str, str]], World | None]]:
    """Yields the providers in their order. Those of other launchers are imported after hvdrun's."""
    yield from (find_assigned, variables.find)
    from sirtaki.bindings.bootstrap.providers import mpi, pmi, slurm, stores

    yield from (mpi.find, slurm.find, pmi.find, stores.find_torchrun)
    yield from (variables.find_kubeflow, variables.find_tf_config)


def find_world(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    key: bytes | str | None = None,
    comm: Any = None,
    environment: Mapping[str, str] = os.environ,
) -> World:
    """Returns this process's world: from the arguments, else from the launcher, else of a single rank.

    Raises:
        ValueError: the arguments are incomplete or contradict each other.
        RendezvousError: the environment is incomplete or contradicts itself.
    """
    if comm is not None:
        if any(argument is not None for argument in (rank, size, address)):
            raise ValueError("init() takes comm, or rank, size and address, but not both")
        from sirtaki.bindings.bootstrap.providers import mpi

        return mpi.of_communicator(comm, environment)
    if any(argument is not None for argument in (rank, size, address, key)):
        return _explicit(rank, size, address, key, environment)
    for find in _providers():
        if (world := find(environment)) is not None:
            return world
    if advice := variables.check_lone_rank(environment):
        sys.stderr.write(f"sirtaki: {advice}\n")
    return single_rank_world()


def _explicit(
    rank: int | None,
    size: int | None,
    address: str | None,
    key: bytes | str | None,
    environment: Mapping[str, str],
) -> World:
    if rank is None or size is None:
        raise ValueError(
            "init() takes rank and size together: rank counts from 0, size is the number of processes"
        )
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank} and size is {size}, but ranks go from 0 to size - 1")
    if size == 1:
        return single_rank_world()
    if address is None:
        raise ValueError("init() needs the address of rank 0 as well, for example address='127.0.0.1:29500'")
    split_addresses(address)
    secret = checked_key(key) if key is not None else key_of(environment)
    job = Job(environment.get("SIRTAKI_JOB", _EXPLICIT_JOB), size, secret, VERSION)
    return World(rank, job, address, start_timeout(environment), serves=rank == 0)
