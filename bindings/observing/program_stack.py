"""Lets the core inspect the program's stack while other ranks wait for this rank.

A thread answers the core's queries with the main thread's stack; it sleeps in the kernel until one arrives.
For a program that holds the interpreter's lock, faulthandler writes the stacks to an unnamed file when it
receives a signal that nothing else uses. `core/observe/records/program_stack.h` defines when each of the two
may be used.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from sirtaki.bindings.config import call
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import ffi, lib

_OWN_FOLDER = os.fsencode(Path(__file__).parents[2])
_QUERY_BYTES = 4
_MAX_FRAMES = 100


@dataclass(frozen=True)
class _Source:
    """The sources of stacks in this process."""

    signal_number: int
    file: int
    query_fd: int  # the descriptor of the core's end
    main_thread: int


def register_stack_source(context: Context) -> None:
    """Lets the context inspect this process's stack, if possible. Must precede `context.start()`."""
    source = _source()
    if source is None:
        return
    folder = ffi.new("char[]", _OWN_FOLDER)
    described = ffi.new("srt_stack_source *")
    described.interpreter_fd, described.file_fd = source.query_fd, source.file
    described.signal_number, described.thread = source.signal_number, source.main_thread
    described.own_folder = folder
    call(lib.srt_watch_stack, context.pointer, described)


@cache
def _source() -> _Source | None:
    """Returns the source, created once per process; None where there can be none."""
    number, main = _unused_signal(), threading.main_thread().ident
    if not number or main is None:
        return None
    try:
        file = _anonymous_file()
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        core_end, thread_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(
            target=_answer_queries, args=(thread_end, main), name="sirtaki stack", daemon=True
        ).start()
    except (OSError, RuntimeError, ValueError):
        return None
    return _Source(number, file, core_end.detach(), main)


def _answer_queries(thread_end: socket.socket, thread: int) -> None:
    while query := thread_end.recv(_QUERY_BYTES):
        frame = sys._current_frames().get(thread)
        try:
            thread_end.send(query + _format_stack(thread, frame).encode(errors="replace"))
        except OSError:
            return


def _format_stack(thread: int, frame: FrameType | None) -> str:
    """Formats a thread's stack as faulthandler does, innermost frame first."""
    lines = [f"Thread 0x{thread:016x} (most recent call first):"]
    while frame is not None and len(lines) <= _MAX_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) + "\n"


def _unused_signal() -> int:
    """Returns the highest real-time signal without a handler, as least likely to be in use; 0 if none."""
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    return 0


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sirtaki-stack")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
