"""Makes the recordings of a rank that somebody who watches the job has ordered, in a thread of their own."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

from sirtaki.bindings.config import call
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import lib
from sirtaki.bindings.ownership import others_can_write
from sirtaki.bindings.recording_orders import RECORDER, Order, read_order

MAX_BYTES = 64 << 20  # of a timeline, which ends when it is larger
_CHECK_SECONDS = 0.1  # between two looks at its size
_JOIN_SECONDS = 1.0


class Recordings:
    """The recordings of this process, one at a time.

    Attributes:
        answer: what has become of the last order; None if there was none.
    """

    def __init__(self, states: Path) -> None:
        """`states` is the folder with the orders."""
        self.answer: dict[str, Any] | None = None
        self._states = states
        self._last = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_recording(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def look(self, context: Context) -> None:
        """Begins the recording that was ordered since the last look, if there is one."""
        if self.is_recording:
            return
        order = read_order(self._states, self._last)
        if order is not None:
            self._last = order.number
            arguments = (context, order)
            self._thread = threading.Thread(
                target=self._record, args=arguments, name="sirtaki recording", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Ends the recording in progress."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def _record(self, context: Context, order: Order) -> None:
        file, note, error = order.file_of(context.rank), "", ""
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(file.parent)
            if order.action == RECORDER:
                call(lib.srt_write_recorder, context.pointer, os.fsencode(file))
            elif context.timeline.start(context, str(file), mark_decisions=False, unless_running=True):
                note = self._watch_timeline(context, file, order.seconds)
            else:
                error = f"a timeline is being written already, to {context.timeline.path}"
        except Exception as problem:  # the job goes on, whatever prevents a recording
            error = str(problem)
        self.answer = {"number": order.number, "file": str(file), "note": note, "error": error}

    def _watch_timeline(self, context: Context, file: Path, seconds: float) -> str:
        """Ends the timeline after some seconds; returns a note if it has ended before."""
        begin = time.monotonic()
        reason = ""
        try:
            while not reason and (left := begin + seconds - time.monotonic()) > 0:
                if self._end.wait(min(left, _CHECK_SECONDS)) or context.is_shut_down:
                    reason = "the rank has left its world"
                elif context.timeline.path != str(file):
                    reason = "the program has started or stopped a timeline"
                elif _size_of(file) >= MAX_BYTES:
                    reason = f"its file has reached {MAX_BYTES >> 20} MiB"
        finally:
            context.timeline.stop(context, str(file))
        return f"its timeline ended after {time.monotonic() - begin:.1f} s: {reason}" if reason else ""


def _check_private(folder: Path) -> None:
    """Raises OSError unless the folder is this user's, so that nobody else has put links there."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or others_can_write(status):
        raise OSError(f"{folder} is not a folder of this user's own, or others may write to it")


def _size_of(file: Path) -> int:
    with contextlib.suppress(OSError):  # somebody has removed it
        return file.stat().st_size
    return 0
