"""Watched operations: a thread learns of their ends, and sleeps in the core meanwhile."""

from __future__ import annotations

from typing import Any

from sirtaki.bindings.config import call
from sirtaki.bindings.context import SLICE_MS, Context
from sirtaki.bindings.library import ffi, lib
from sirtaki.bindings.request import Batch

_OK: int = lib.SRT_OK
_IN_PROGRESS: int = lib.SRT_IN_PROGRESS
_CAPACITY = 512  # handles that are reported by one call


class Watch:
    """The end of a rank's watched operations, for one thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._handles: Any = ffi.new("srt_handle[]", _CAPACITY)
        self._count: Any = ffi.new("int32_t *")

    def collect(self) -> list[int] | None:
        """Returns the handles of watched operations that have ended, or are launched on a GPU, in this order.

        Sleeps until there are any, with the interpreter's lock released, but not longer than SLICE_MS. None:
        the context is dead, and all its operations were reported.
        """
        status = lib.srt_wait_watched(self._context.pointer, self._handles, _CAPACITY, self._count, SLICE_MS)
        if status == _OK:
            return list(self._handles[0 : self._count[0]])
        self._context.run_progress_callbacks()
        return [] if status == _IN_PROGRESS else None


def watch(context: Context, batch: Batch) -> None:
    """Watches the operations of a batch: `Watch.collect` returns each of its handles once.

    The engine's thread drives them, so nobody needs to wait.
    """
    call(lib.srt_watch, context.pointer, batch.handles, batch.count)
