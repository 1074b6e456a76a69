"""Adds to a rank's timeline what its program does: the lines that it runs, and the pauses that it cannot see.

A thread looks 50 times a second, while a timeline is written, at the line of the main thread, at the time for
which the kernel let that thread wait for a core (/proc/self/task/TID/schedstat) and at the time for which a
quota stopped the control group (cpu.stat). Collections of garbage report themselves (gc.callbacks).
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sirtaki.bindings.context import Context
from sirtaki.bindings.library import lib
from sirtaki.bindings.observing.user_code import frame_of_main_thread, line_of

COLLECTION, NO_CORE, QUOTA = "garbage collection", "no free core", "stopped by a CPU quota"
LINES = "lines of the program"
_INTERVAL_SECONDS = 0.02
_LEAST_PAUSE_NS = 1_000_000
_LONGEST_LINE_NS = 200_000_000  # after which a line that goes on is written
_MAX_BYTES = 4096  # of a file of the kernel
_JOIN_SECONDS = 1.0
_ROOT = Path("/")


class ProgramWatch:
    """Samples this process for a timeline, from creation to `stop` or to the end of the context."""

    def __init__(self, context: Context) -> None:
        self._context = weakref.ref(context)
        self._pid = os.getpid()
        self._end = threading.Event()
        self._collection_began = 0
        self._thread = threading.Thread(target=self._run, name="sirtaki program", daemon=True)
        gc.callbacks.append(self._on_collection)
        try:
            self._thread.start()
        except RuntimeError:  # there are too many threads
            gc.callbacks.remove(self._on_collection)
            raise

    def stop(self) -> None:
        """Adds what was not added yet, and ends the watch. Does nothing in a forked child."""
        self._end.set()
        if os.getpid() == self._pid:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        lines = _Lines()
        with contextlib.ExitStack() as opened:
            pauses = list(_counted_pauses(opened))
            while not self._end.wait(_INTERVAL_SECONDS) and self._is_wanted():
                self._look(lines, pauses)
            self._look(lines, pauses, is_last=True)
        gc.callbacks.remove(self._on_collection)

    def _look(self, lines: _Lines, pauses: Sequence[_CountedPause], is_last: bool = False) -> None:
        now = time.monotonic_ns()
        for line, began in lines.look(now, is_last):
            self._add(LINES, line, began, now)
        for pause in pauses:
            if (duration := pause.look()) >= _LEAST_PAUSE_NS:
                self._add(pause.name, pause.name, now - duration, now)

    def _is_wanted(self) -> bool:
        context = self._context()
        return context is not None and not context.is_shut_down

    def _add(self, track: str, what: str, begin: int, end: int) -> None:
        context = self._context()
        if context is not None and os.getpid() == self._pid:
            text = what.encode(errors="replace")
            lib.srt_timeline_program(context.pointer, track.encode(), text, begin, end)

    def _on_collection(self, phase: str, _: object) -> None:
        now = time.monotonic_ns()
        if phase == "start":
            self._collection_began = now
        elif self._collection_began and now - self._collection_began >= _LEAST_PAUSE_NS:
            self._add(COLLECTION, COLLECTION, self._collection_began, now)


class _Lines:
    """The lines of the main thread; a line lasts from its first sample to the sample of the next line."""

    def __init__(self) -> None:
        self._line, self._began = "", 0

    def look(self, now: int, is_last: bool = False) -> Iterator[tuple[str, int]]:
        """Yields the line that ends now, or has lasted long, and its begin."""
        line = line_of(frame_of_main_thread())
        if line == self._line and not is_last and now - self._began < _LONGEST_LINE_NS:
            return
        if self._line:
            yield self._line, self._began
        self._line, self._began = line, now


class _CountedPause:
    """A pause of which the kernel counts the nanoseconds in a file."""

    def __init__(self, name: str, file: int, parse: Callable[[str], int]) -> None:
        self.name, self._file, self._parse = name, file, parse
        self._counted = self._read()

    def look(self) -> int:
        """Returns the nanoseconds since the last look that returned a pause which is long enough to add."""
        total = self._read()
        since = total - self._counted
        if since >= _LEAST_PAUSE_NS:
            self._counted = total
        return since

    def _read(self) -> int:
        try:
            return self._parse(os.pread(self._file, _MAX_BYTES, 0).decode())
        except (OSError, ValueError, IndexError):  # the control group is gone, or the kernel counts nothing
            return 0


def _counted_pauses(opened: contextlib.ExitStack, root: Path = _ROOT) -> Iterator[_CountedPause]:
    """Yields the pauses that this process's kernel counts; `opened` closes their files."""
    thread = root / f"proc/self/task/{threading.main_thread().native_id}/schedstat"
    files = [(NO_CORE, thread, _waited), *((QUOTA, file, _stopped) for file in _quota_files(root))]
    for name, file, parse in files:
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            yield _CountedPause(name, descriptor, parse)


def _waited(schedstat: str) -> int:
    """Returns the time in which a thread could run and had no core."""
    return int(schedstat.split()[1])


def _stopped(cpu_stat: str) -> int:
    """Returns the time in which a quota stopped a control group, of version 1 or 2 of the kernel's."""
    counts = dict(line.split() for line in cpu_stat.splitlines())
    return int(counts.get("throttled_time", 0)) or 1000 * int(counts.get("throttled_usec", 0))


def _quota_files(root: Path) -> Iterator[Path]:
    """Yields the file cpu.stat of each control group around this process."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, group = membership.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        place = top / group.lstrip("/")
        for folder in (place, *place.parents):
            if (folder / "cpu.stat").is_file():
                yield folder / "cpu.stat"
            if folder == top:
                break
