"""The file of a context's timeline, which the core writes, and the watch of the program for it."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from sirtaki.bindings.config import call
from sirtaki.bindings.library import lib

if TYPE_CHECKING:
    from sirtaki.bindings.context import Context
    from sirtaki.bindings.observing.program_timeline import ProgramWatch


class TimelineFile:
    """The file in progress, if any. Threads may start and stop it at the same time.

    Attributes:
        path: the file that is being written; "" if there is none.
    """

    def __init__(self) -> None:
        self.path = ""
        self._watch: ProgramWatch | None = None
        self._lock = threading.Lock()

    def start(self, context: Context, path: str, mark_decisions: bool, unless_running: bool = False) -> bool:
        """Starts a file, after completing any file in progress. Raises OSError.

        With `unless_running` it returns False instead, and changes nothing, if there is one in progress.
        """
        with self._lock:
            if self.path and unless_running:
                return False
            self.end_watch()
            self.path = ""
            call(lib.srt_timeline_start, context.pointer, os.fsencode(path), mark_decisions)
            from sirtaki.bindings.observing.program_timeline import ProgramWatch  # other jobs need none of it

            try:
                self._watch = ProgramWatch(context)
            except BaseException:  # there may be no further thread
                lib.srt_timeline_stop(context.pointer)
                raise
            self.path = path
            return True

    def stop(self, context: Context, path: str = "") -> None:
        """Completes the file; does nothing if there is no file, or if its path is not `path`."""
        with self._lock:
            if path in ("", self.path):
                self.end_watch()
                self.path = ""
                lib.srt_timeline_stop(context.pointer)

    def forget_in_child(self) -> None:
        """Forgets the file in a forked child, where nobody writes it, and no thread gives the lock back."""
        self.path, self._watch, self._lock = "", None, threading.Lock()

    def end_watch(self) -> None:
        """Ends the watch of the program, if there is any. Takes no lock: a forked child may call it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
