"""The program's MPI library, as the core sees it: addresses of functions, and handles as numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sirtaki.bindings.config import call
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import ffi, lib


def link_mpi(
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
