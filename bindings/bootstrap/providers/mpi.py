"""Ranks that MPI started, or that belong to an MPI communicator, found with mpi4py.

MPI supplies the ranks and their number, and its own channel passes the key and the address of the rendezvous.
The data uses sirtaki's own links, or, with transport=mpi, the communicator (`mpi_links.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from sirtaki.bindings.bootstrap.job import KEY_BYTES, Job, RendezvousError
from sirtaki.bindings.bootstrap.providers import pmi, slurm
from sirtaki.bindings.bootstrap.providers.world import (
    VERSION,
    World,
    key_of,
    single_rank_world,
    start_timeout,
)

# Number of processes that a launcher has started: Open MPI's, MPICH's and Intel MPI's, Cray's.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE")


def find(environment: Mapping[str, str]) -> World | None:
    """Returns the world of MPI's launcher; None if no such launcher has started this process."""
    sizes = [environment[name] for name in _SIZES if environment.get(name, "1") != "1"]
    if not sizes:
        return None
    has_other_provider = slurm.is_task(environment) or pmi.DESCRIPTOR in environment
    try:
        from mpi4py import MPI
    except ImportError as error:
        if has_other_provider:
            return None
        raise RendezvousError(
            f"mpirun has started {sizes[0]} processes, but mpi4py cannot be imported ({error}): `pip install "
            "mpi4py`, set SIRTAKI_RENDEZVOUS=HOST:PORT to the place of rank 0, or start them with hvdrun"
        ) from None
    world: Any = MPI.COMM_WORLD
    if world.Get_size() == 1:
        if has_other_provider:
            return None
        raise RendezvousError(
            f"mpirun has started {sizes[0]} processes, but each sees only itself: mpi4py uses another MPI "
            f"({MPI.Get_library_version().splitlines()[0]}). Install mpi4py for the MPI of this mpirun, or "
            "use hvdrun"
        )
    return of_communicator(world, environment)


def of_communicator(comm: Any, environment: Mapping[str, str]) -> World:
    """Returns the world of the ranks of an mpi4py communicator; all of them must call it.

    Raises ValueError if it is not a communicator, or if this process does not belong to it.
    """
    try:
        from mpi4py import MPI
    except ImportError:
        raise ValueError("init(comm=...) takes a communicator of mpi4py, which is not installed") from None
    if not isinstance(comm, MPI.Intracomm):
        raise ValueError(
            f"init(comm=...) takes a communicator of mpi4py, not {type(comm).__name__}; for some of the "
            "ranks of a world there are process sets: init(process_sets=[[0, 1]])"
        )
    if comm == MPI.COMM_NULL:
        raise ValueError(
            "this process does not belong to the communicator: only those that do call init(comm=...)"
        )
    size: int = comm.Get_size()
    if size == 1:
        return single_rank_world()
    rank: int = comm.Get_rank()
    own = (secrets.token_hex(8), key_of(environment) or secrets.token_bytes(KEY_BYTES)) if rank == 0 else None
    name, key = comm.bcast(own, root=0)
    job = Job(name, size, key, VERSION)

    def announce(address: str) -> str:
        return str(comm.bcast(address, root=0))

    return World(
        rank, job, "*:0", start_timeout(environment), serves=rank == 0, announce=announce, communicator=comm
    )
