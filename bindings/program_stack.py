"""Lets the core see where the program is while other ranks wait for it, without the interpreter's lock.

faulthandler writes the stacks of all threads to a file without a name when a signal comes that nobody else
uses. The core's own thread raises that signal for itself and reads the file: the program is not interrupted.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
from functools import cache
from pathlib import Path

from sirtaki._core.context import Context
from sirtaki._core.errors import error_of
from sirtaki._core.library import ffi, lib, text

_OWN_FOLDER = str(Path(__file__).parents[1])


def show_to(context: Context) -> None:
    """Before `context.start()`: lets the context see this process's stack, where that is possible."""
    number, descriptor = _registered()
    thread = threading.main_thread().ident
    if not number or thread is None:
        return
    error = ffi.new("srt_error *")
    folder = os.fsencode(_OWN_FOLDER)
    status = lib.srt_watch_stack(context.pointer, descriptor, number, thread, folder, error)
    if status != lib.SRT_OK:
        raise error_of(status, text(error.text))


@cache
def _registered() -> tuple[int, int]:
    """The signal and the descriptor, once a process; (0, -1) where there is none."""
    number = _free_signal()
    if not number:
        return 0, -1
    try:
        descriptor = _nameless_file()
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    except (OSError, RuntimeError, ValueError):
        return 0, -1
    return number, descriptor


def _free_signal() -> int:
    """A real-time signal that nobody handles; the highest ones are the least likely to be wanted."""
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    return 0


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sirtaki-stack")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
