"""Data links over the program's own MPI library, with the setting transport=mpi.

The core calls MPI itself, through the addresses of the functions of mpi4py's library. Messages travel in a
communicator of sirtaki's own, one for each of the program's that init() was called with. It is made once and
never freed, because both are collective: worlds that follow each other differ by the tag of their messages.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sirtaki.bindings.bootstrap.job import RendezvousError, RendezvousTimeout, name_ranks
from sirtaki.bindings.bootstrap.providers import World
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import Config, call, ffi, lib

_TAGS = 1 << 15  # that every MPI has (MPI_TAG_UB)
_FUNCTIONS = {
    "issend": "MPI_Issend",
    "iprobe": "MPI_Iprobe",
    "irecv": "MPI_Irecv",
    "test": "MPI_Test",
    "get_count": "MPI_Get_count",
}


@dataclass
class _Own:
    """Holds sirtaki's duplicate of a communicator, and the number of worlds that have used it."""

    communicator: Any
    pending: Any  # the request of its making, until it is complete: MPI writes to the communicator until then
    worlds: int = 0


def check(config: Config, world: World) -> None:
    """Raises RendezvousError if MPI cannot move the data of this world."""
    if world.communicator is None:
        raise RendezvousError(
            "transport is mpi, but this job's ranks have no communicator of MPI: start them with "
            f"`SIRTAKI_TRANSPORT=mpi mpirun -n {world.job.size} python train.py`, call hvd.init(comm=...), "
            "or choose another transport"
        )
    if config.get("encrypt") == "1":
        raise RendezvousError(
            "transport is mpi, and encrypt is set, but sirtaki cannot encrypt what MPI sends: set only one "
            "of SIRTAKI_TRANSPORT=mpi and SIRTAKI_ENCRYPT=1"
        )
    from mpi4py import MPI

    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise RendezvousError(
            "transport is mpi, which needs MPI's thread level MPI_THREAD_MULTIPLE, because a thread of "
            "sirtaki calls MPI beside the program: let mpi4py initialise MPI, "
            "without changing mpi4py.rc.thread_level"
        )
    _functions()


def state(world: World) -> bytes:
    """Returns what other ranks have to know of this rank's duplicate before all call link()."""
    own: _Own | None = world.communicator.Get_attr(_keyval())
    return str(-1 if own is None else own.worlds).encode()


def link(context: Context, world: World, states: Sequence[bytes], peers: Sequence[int]) -> None:
    """Has MPI move the data between this rank and its peers on other hosts. All ranks must call it.

    Args:
        states: what state() has returned, by rank.

    Raises:
        RendezvousError: an earlier init() with this communicator has failed on some of its ranks only.
        RendezvousTimeout: another rank did not call it in time.
    """
    from mpi4py import MPI

    worlds = [int(state) for state in states]
    without = [rank for rank, world in enumerate(worlds) if world < 0]
    if 0 < len(without) < len(worlds):
        raise RendezvousError(
            f"transport is mpi, and in an earlier init() with this communicator {name_ranks(without)} failed "
            "before the others: pass another, as hvd.init(comm=MPI.COMM_WORLD.Dup()), or start the job again"
        )
    own = _own(world.communicator, time.monotonic() + world.start_timeout)
    own.worlds = max(0, *worlds) + 1  # a rank may have missed worlds that failed early
    handles = {"comm": MPI._handleof(own.communicator), "byte_type": MPI._handleof(MPI.BYTE)}
    _link_mpi(context, peers, _functions(), tag=own.worlds % _TAGS, **handles)


def _own(comm: Any, deadline: float) -> _Own:
    """Returns sirtaki's duplicate of a communicator, which the communicator keeps from the first call on."""
    from mpi4py import MPI

    own: _Own | None = comm.Get_attr(_keyval())
    if own is None:
        own = _Own(*comm.Idup())
        comm.Set_attr(_keyval(), own)
    while own.pending is not None and not own.pending.Test():
        if time.monotonic() > deadline:
            raise RendezvousTimeout(
                "MPI has not linked all ranks in time, although all were there before: one may have ended "
                "since; its own output says why"
            )
        time.sleep(0.001)
    if own.pending is not None:
        own.pending = None
        own.communicator.Set_errhandler(MPI.ERRORS_RETURN)
    return own


@cache
def _functions() -> dict[str, int]:
    """Returns the addresses of the functions of MPI that the core calls."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # functions are also found in the libraries that it needs
    try:
        return {
            field: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            for field, name in _FUNCTIONS.items()
        }
    except AttributeError as error:
        raise RendezvousError(
            f"transport is mpi, but a function of MPI is not found: {error}; choose another transport"
        ) from None


@cache
def _keyval() -> int:
    from mpi4py import MPI

    keyval: int = MPI.Comm.Create_keyval()
    return keyval


# ---- The program's MPI library, as the core sees it: addresses of functions, and handles as numbers ----


def _link_mpi(
    context: Context,
    peers: Sequence[int],
    functions: Mapping[str, int],
    tag: int,
    comm: int,
    byte_type: int,
) -> None:
    """Has MPI move the data to and from peers on other hosts, before the start; see `srt_mpi`."""
    handles = {"comm": _signed(comm), "byte_type": _signed(byte_type)}
    described = ffi.new(
        "srt_mpi *",
        {"struct_size": ffi.sizeof("srt_mpi"), "tag": tag}
        | handles
        | {name: ffi.cast("void *", address) for name, address in functions.items()},
    )
    call(lib.srt_link_mpi, context.pointer, ffi.new("int32_t[]", list(peers)), len(peers), described)


def _signed(handle: int) -> int:
    """Returns a handle as a signed number: MPICH's handles can be negative, and mpi4py returns 64 bits."""
    return handle - (1 << 64) if handle >> 63 else handle
