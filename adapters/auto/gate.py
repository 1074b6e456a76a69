"""Rank 0 first: other ranks wait with their first look at files until rank 0 has prepared its data.

Until its first exchange with other ranks, a script downloads data, builds caches and makes folders. Rank 0
does this alone; a rank above 0 that is about to look at a file waits until rank 0 waits for an exchange, or
until its script has ended. So it finds complete files. Imports of libraries do not wait, so that all ranks
import them at the same time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import FrameType
from typing import Any

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.bindings.library import ffi
from sirtaki.bindings.observing.user_code import is_internal
from sirtaki.common.ops.handles import Handle, Operation, pooled_batch, start
from sirtaki.common.ops.requests import Call, describe
from sirtaki.common.ops.tensor import DTYPE_CODES, ROW_MAJOR, TensorView

_NAME = "the data that rank 0 prepares (hvdrun --auto)"  # stall reports show it
_WORLD = 0  # the process set of all ranks
_IMPORT_SYSTEM = "<frozen importlib"


class Gate:
    """A broadcast of rank 0. Each rank starts it once: when it first waits for other ranks, or at its end.

    Ranks above 0 start it before they look at a file, too, and then wait for it. An exchange of the script's
    never waits for the gate, as a wait for an exchange starts it.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pid = os.getpid()
        self._starting, self._waiting = threading.Lock(), threading.Lock()
        self._handle: Handle[None] | None = None
        self.is_open = context.size == 1 or context.rank == 0  # for this rank
        if context.size > 1:
            context.add_progress_callback(self._start_in_wait)

    def pass_through(self) -> None:
        """Waits for rank 0. Children that were forked before, and imports of libraries, do not wait.

        Raises:
            HorovodInternalError: rank 0 has failed, or did not come in time.
        """
        if self.is_open or os.getpid() != self._pid or is_import():
            return
        handle = self._started()
        with self._waiting:
            handle.wait()
            self.is_open = True

    def finish(self) -> None:
        """Ends all waiting: the script of this rank has ended."""
        self.is_open = True
        if self._context.size > 1:
            with contextlib.suppress(HorovodInternalError):  # the world has failed, which others report
                self._started()

    def _started(self) -> Handle[None]:
        with self._starting:
            if self._handle is None:
                self._handle = broadcast(self._context, bytearray(1), _NAME)
            return self._handle

    def _start_in_wait(self) -> bool:
        with contextlib.suppress(HorovodInternalError):
            self._started()
        return True


def broadcast(context: Context, data: bytearray, name: str) -> Handle[Any]:
    """Starts a broadcast of rank 0's bytes, in place."""
    memory = ffi.from_buffer(data)
    pointer = int(ffi.cast("uintptr_t", memory))
    view = TensorView(pointer, (len(data),), DTYPE_CODES["uint8"], ROW_MAJOR, memory)
    batch = pooled_batch()
    describe(batch, core.BROADCAST, view, view.pointer, Call(name, _WORLD), root=0)
    return start(context, Operation(batch, view, lambda *_: None))


def is_import() -> bool:
    """Returns whether the code that runs is that of a library which is being imported, not the script's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_internal(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            return True
        frame = frame.f_back
    return False
