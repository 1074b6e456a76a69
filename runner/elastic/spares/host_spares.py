"""The spares of a host, held by hvdrun or the host's agent; the job's pool decides how many there are."""

from __future__ import annotations

import os
import select
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from sirtaki.bindings.bootstrap.elastic.loaded_modules import list_path
from sirtaki.runner.elastic.spares.spare_process import SpareProcess
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.supervise.failure_analysis import ExitStatus, killed_by

_LIST_SECONDS = 0.5  # between looks for the list of modules, which a rank writes after its first commit
_END_SECONDS = 2.0  # for spares that were told to end, and only have to leave


class SpareNews(Protocol):
    """Receives a host's reports about its spares; each spare is identified by its lane."""

    def started(self, lane: int, pid: int) -> None: ...

    def waits(self, lane: int, modules: int, seconds: float) -> None:
        """Called when a spare is ready: number of imported modules, import time in seconds."""

    def ended(self, lane: int, why: str) -> None:
        """Called when a spare has ended or could not start; `why` follows its name in a sentence."""


class HostSpares:
    """The spares of the host on which this runs."""

    def __init__(
        self,
        start: Callable[[], SpareProcess],
        read: Callable[[SpareProcess], None],
        folder: Path,
        selector: selectors.BaseSelector,
        news: SpareNews,
    ) -> None:
        """Holds no spare yet.

        Args:
            start: starts a process. Raises OSError and LaunchError.
            read: shows a process's output as that of its `rank`, which is its lane until it takes a place.
            folder: the job's folder on this host, where ranks write the list of their modules.
            selector: the one of the main loop, which calls all methods.
            news: the receiver of the reports.
        """
        self._start_process = start
        self._read_output = read
        self._list = list_path(str(folder))
        self._selector = selector
        self._news = news
        self._pending: list[int] = []  # those that start when the list is there, by their lanes
        self._look_at = 0.0  # when to look for it again (time.monotonic())
        self._processes: dict[int, SpareProcess] = {}  # those that wait
        self._leaving: dict[int, SpareProcess] = {}  # dismissed, or unable to take their place

    @property
    def due(self) -> float | None:
        """Returns when to call `advance` (time.monotonic()); None if nothing is due."""
        return self._look_at if self._pending else None

    def start(self, lane: int) -> None:
        """Starts a spare with the next `advance` after a rank of this host has written its modules."""
        self._pending.append(lane)
        self._look_at = 0.0

    def advance(self, now: float) -> None:
        """Starts the spares that are due."""
        if not self._pending or now < self._look_at:
            return
        self._look_at = now + _LIST_SECONDS
        if os.path.exists(self._list):
            pending, self._pending = self._pending, []
            for lane in pending:
                self._start(lane)

    def take(self, lane: int, rank: int, environment: Mapping[str, str]) -> SpareProcess | None:
        """Makes a spare a worker with this environment; its output becomes that of `rank`.

        Returns None if it has ended, which is reported, or has not started.
        """
        process = self._remove(lane)
        if process is None or process.assign(rank, environment):
            return process
        self._leaving[lane] = process
        return None

    def dismiss(self, lane: int) -> None:
        """Dismisses a spare that still waits."""
        if (process := self._remove(lane)) is not None:
            process.dismiss()
            self._leaving[lane] = process

    def check(self) -> None:
        """Reports the spares that have ended."""
        for lane, process in [*self._processes.items(), *self._leaving.items()]:
            if status := process.check():
                self._remove(lane)
                self._leaving.pop(lane, None)
                process.clear()
                process.close()
                self._news.ended(lane, _describe(status))

    def kill(self) -> None:
        """Kills all spares."""
        for process in (*self._processes.values(), *self._leaving.values()):
            process.signal(signal.SIGKILL)

    def reap(self) -> None:
        """Dismisses all spares, waits for them, and kills spares that do not exit in time."""
        for lane in (*self._pending, *self._processes):
            self.dismiss(lane)
        deadline = time.monotonic() + _END_SECONDS
        for process in self._leaving.values():
            if not _leaves(process, deadline):
                process.signal(signal.SIGKILL)
            process.close()
            process.reap()
        self._leaving.clear()

    def _start(self, lane: int) -> None:
        try:
            process = self._start_process()
        except (OSError, LaunchError) as error:
            self._news.ended(lane, f"cannot be started: {error}")
            return
        process.rank = lane
        self._processes[lane] = process
        self._selector.register(process, selectors.EVENT_READ, lambda: self._read(lane, process))
        self._read_output(process)
        self._news.started(lane, process.pid)

    def _read(self, lane: int, process: SpareProcess) -> None:
        if lane not in self._processes:
            return
        reports = process.reports()
        if reports is None:  # it has ended, or is about to: `check` reports that
            self._unregister(process)
            return
        for report in reports:
            self._news.waits(lane, *report)

    def _remove(self, lane: int) -> SpareProcess | None:
        """Returns the process of a spare, which counts as waiting no more; None if it has none."""
        if lane in self._pending:
            self._pending.remove(lane)
        if (process := self._processes.pop(lane, None)) is not None:
            self._unregister(process)
        return process

    def _unregister(self, process: SpareProcess) -> None:
        if process.fileno() in self._selector.get_map():
            self._selector.unregister(process)


def _describe(status: ExitStatus) -> str:
    if status.killed_by:
        return f"was {killed_by(status.killed_by)}"
    if status.code:
        return f"has failed with exit code {status.code}"
    return "has ended before it called hvd.init()"


def _leaves(process: SpareProcess, deadline: float) -> bool:
    """Waits until a spare closes its end of the connection, as its exit does; returns whether it has."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1e3) and process.reports() is None:
            return True
    return False
