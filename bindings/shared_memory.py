"""Memory for tensors that the ranks of a host share: all-reduces change tensors in it where they are."""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections.abc import Sequence
from typing import Any

from sirtaki.bindings.context import Context, current
from sirtaki.bindings.errors import UnsupportedError, error_of
from sirtaki.bindings.library import ffi, lib, text


class _Memory:
    """Memory that the core has allocated. A forked child has a view of its own, and frees nothing."""

    __slots__ = ("__weakref__", "pid", "pointer")

    def __init__(self, pointer: Any) -> None:
        self.pointer = pointer
        self.pid = os.getpid()

    def free(self, _: Any) -> None:
        if self.pid == os.getpid():
            lib.srt_buffer_destroy(self.pointer)


def allocate(context: Context, size: int) -> Any:
    """Returns a writable buffer of `size` zeroed bytes, at the beginning of a page. It outlives the context.

    Raises:
        HorovodInternalError: this rank's share of the host's memory is in use.
        UnsupportedError: this rank shares no memory for tensors with others.
    """
    error = ffi.new("srt_error *")
    pointer = lib.srt_buffer_create(context.pointer, size, error)
    if pointer == ffi.NULL:
        raise error_of(error[0].status, text(error.text))
    memory = _Memory(pointer)
    _live.add(memory)
    return ffi.buffer(ffi.gc(ffi.cast("char *", lib.srt_buffer_address(pointer)), memory.free), size)


_live: weakref.WeakSet[_Memory] = weakref.WeakSet()


def _after_fork() -> None:
    for memory in list(_live):
        lib.srt_buffer_fork_child(memory.pointer)


os.register_at_fork(after_in_child=_after_fork)


# ---- Memory of arrays that the ranks of a host share, for any library ----------------------------------


def memory_of(shape: int | Sequence[int], itemsize: int) -> tuple[tuple[int, ...], Any]:
    """Returns an array's extents, and zeroed memory for it; None instead of memory where ranks share none.

    Raises:
        OutOfMemoryError: there is not enough memory, or this rank's share of it is in use.
        NotInitializedError: init() has not been called.
    """
    extents = tuple(shape) if isinstance(shape, Sequence) else (operator.index(shape),)
    try:
        return extents, allocate(current(), math.prod(extents) * itemsize)
    except UnsupportedError:
        return extents, None
