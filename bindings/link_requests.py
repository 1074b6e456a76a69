"""The links of a rank that are made while it runs, when an operation first needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sirtaki.bindings.config import call
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import ffi, lib

_OK: int = lib.SRT_OK
_IN_PROGRESS: int = lib.SRT_IN_PROGRESS
_SLICE_MS = 10_000
_CAPACITY = 256  # peers that one call reports


def first_links(context: Context) -> list[int]:
    """Returns the ranks to which `Context.start` needs links, ascending, before it is called."""
    peers: Any = ffi.new("int32_t[]", context.size)
    return list(peers[0 : lib.srt_first_links(context.pointer, peers, context.size)])


class LinkRequests:
    """The requests for lazy connections, for a single thread. Create it before `Context.start`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._peers: Any = ffi.new("int32_t[]", _CAPACITY)
        self._count: Any = ffi.new("int32_t *")
        lib.srt_allow_link_requests(context.pointer)

    def collect(self) -> list[int] | None:
        """Returns ranks to which links are needed; sleeps until there are any, with the interpreter's lock
        released. None: no further link will be needed.
        """
        while True:
            status = lib.srt_wait_link_requests(
                self._context.pointer, self._peers, _CAPACITY, self._count, _SLICE_MS
            )
            if status == _OK:
                return list(self._peers[0 : self._count[0]])
            if status != _IN_PROGRESS:
                return None

    def fail(self, rank: int, text: str) -> None:
        """Reports that there can be no link to a rank: it counts as lost, with this text."""
        lib.srt_fail_link(self._context.pointer, rank, text.encode("utf-8", "replace").replace(b"\0", b" "))


# ---- The program's MPI library, as the core sees it: addresses of functions, and handles as numbers ----


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
