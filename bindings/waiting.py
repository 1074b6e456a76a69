"""Waits for operations that several threads may wait for, each with a limit of its own.

Unlike `Context.wait`, these functions release nothing, because another thread may still wait for a handle.
"""

from __future__ import annotations

import time
from typing import Any

from sirtaki.bindings.context import SLICE_MS, Context
from sirtaki.bindings.errors import CLASSES, error_of
from sirtaki.bindings.library import call, ffi, lib, text
from sirtaki.bindings.request import Batch, profiled

_OK: int = lib.SRT_OK
_IN_PROGRESS: int = lib.SRT_IN_PROGRESS


@profiled(", wait")
def wait_for(context: Context, batch: Batch, seconds: float | None) -> bool:
    """Waits until all requests of a batch have ended; returns whether they have. None: as long as it takes.

    The interpreter's lock is released, and a Ctrl-C ends the wait.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        left = SLICE_MS if deadline is None else 1000 * (deadline - time.monotonic())
        limit = min(SLICE_MS, max(0, round(left)))
        if lib.srt_wait(context.pointer, batch.handles, batch.count, limit) != _IN_PROGRESS:
            return True
        context.run_progress_callbacks()
        if left <= 0:
            return False


@profiled(", wait")
def wait_for_launch(context: Context, batch: Batch, stream: int, seconds: float) -> bool:
    """Waits until the requests of a batch on a GPU are launched, or have failed; returns whether they have.

    From then on a CUDA stream waits for them. The interpreter's lock is released.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = 1000 * (deadline - time.monotonic())
        limit = min(SLICE_MS, max(0, round(left)))
        status = lib.srt_wait_on_stream(context.pointer, batch.handles, batch.count, stream, limit)
        if status != _IN_PROGRESS:
            return True
        context.run_progress_callbacks()
        if left <= 0:
            return False


def failure_of(context: Context, batch: Batch) -> Exception | None:
    """Returns the error of the first failed request of a batch that has ended; None if all succeeded.

    Requests on a GPU may still run there: then the error is that of a context that has failed.
    """
    states = [(handle, lib.srt_poll(context.pointer, handle)) for handle in batch.handles]
    for handle, status in states:
        if status not in (_OK, _IN_PROGRESS):
            return error_of(status, text(lib.srt_handle_error(context.pointer, handle)))
    return failure_of_context(context) if any(status == _IN_PROGRESS for _, status in states) else None


def failure_of_context(context: Context) -> Exception | None:
    """Returns the error with which all operations of a dead context fail; None while it is alive."""
    failure = context.failure
    return None if failure is None else CLASSES[failure.kind](failure.text)


# ---- Watched operations: a thread learns of their ends, and sleeps in the core meanwhile ---------------


_CAPACITY = 512  # handles that are reported by one call


class Watch:
    """Reports the ends of a rank's watched operations, for a single thread."""

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
