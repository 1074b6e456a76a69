"""The spares of an elastic job on this host: starts, watches and ends them, as its pool decides."""

from __future__ import annotations

import os
import select
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from sirtaki.runner.elastic.spare_process import SpareProcess
from sirtaki.runner.elastic.spares import SparePool
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.failure_analysis import ExitStatus, signal_name
from sirtaki.runner.process import RankProcess
from sirtaki.runner.rendezvous.elastic.loaded_modules import list_path

_LIST_SECONDS = 0.5  # between looks for the list of modules, which a rank writes after its first commit
_END_SECONDS = 2.0  # for spares that were told to end, and only have to leave


class SpareDisplay(Protocol):
    """The part of the display that spares need."""

    def say(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...

    def read_spare(self, stdout: int, stderr: int) -> None:
        """Shows the data from these descriptors as the output of a spare."""

    def move_spare(self, lane: int, stdout: int, stderr: int) -> None:
        """Shows the data from these descriptors as the output of a slot from now on."""


class JobSpares:
    """The spares. Its methods are called by the job's main loop."""

    def __init__(
        self,
        wanted: int,
        start: Callable[[], SpareProcess],
        folder: Path,
        selector: selectors.BaseSelector,
        display: SpareDisplay,
    ) -> None:
        self.wanted = wanted
        self._pool = SparePool(wanted)
        self._start_process = start
        self._list = list_path(str(folder))
        self._selector = selector
        self._display = display
        self._processes: dict[int, SpareProcess] = {}  # those that wait, by their numbers
        self._dismissed: list[SpareProcess] = []
        self._look_at: float | None = None  # when to look for the list again
        self._has_list = False
        self._is_over = False

    @property
    def due(self) -> float | None:
        """Returns when to call `advance` (time.monotonic()); None if nothing is due."""
        return None if self._is_over else self._look_at or self._pool.due

    def advance(self, hosts: Sequence[str], is_running: bool, now: float) -> None:
        """Starts the spares that are missing, and ends those of hosts that are not among these any more."""
        if self._is_over or not self._pool.wanted:
            return
        self._has_list = self._has_list or os.path.exists(self._list)
        self._look_at = now + _LIST_SECONDS if is_running and not self._has_list else None
        started, gone = self._pool.advance(hosts, is_running and self._has_list, now)
        for spare in gone:
            self._dismiss(self._processes.pop(spare.number))
        for spare in started:
            self._start(spare.number, now)

    def __contains__(self, host: object) -> bool:
        """Returns whether a spare waits that can take a place on this host at once."""
        return isinstance(host, str) and self._pool.has_ready(host)

    def take(self, host: str, lane: int, environment: Mapping[str, str], now: float) -> RankProcess | None:
        """Makes a spare a worker, with this environment, whose output is shown under this number.

        Returns None if there is none.
        """
        while (number := self._pool.take(host, now)) is not None:
            process = self._processes.pop(number)
            self._unregister(process)
            if process.assign(lane, environment):
                self._display.move_spare(lane, process.stdout, process.stderr)
                return process
            self._dismissed.append(process)
            self._display.say(f"a spare on {host} has ended just before it took a place")
        return None

    def check(self, now: float) -> None:
        """Notes the spares that have ended."""
        for number, process in list(self._processes.items()):
            if status := process.check():
                self._note_end(number, process, status, now)

    def end(self) -> None:
        """Tells all spares that they are not needed: the job ends."""
        self._is_over = True
        for process in self._processes.values():
            self._dismiss(process)
        self._processes.clear()

    def reap(self) -> None:
        """Waits for the spares that were told to end, and kills those that do not."""
        self.end()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._dismissed:
            if not _leaves(process, deadline):
                process.signal(signal.SIGKILL)
            process.close()
            process.reap()
        self._dismissed.clear()

    def _start(self, number: int, now: float) -> None:
        try:
            process = self._start_process()
        except (OSError, LaunchError) as error:
            self._say(self._pool.note_end(number, f"cannot be started: {error}", now))
            return
        self._processes[number] = process
        self._selector.register(process, selectors.EVENT_READ, lambda: self._read(number))
        self._display.read_spare(process.stdout, process.stderr)
        self._display.detail(f"spare {number} is pid {process.pid}")

    def _read(self, number: int) -> None:
        process = self._processes.get(number)
        if process is None:
            return
        reports = process.reports()
        if reports is None:  # it has ended, or is about to: its end is noted when it is there
            self._unregister(process)
            return
        for report in reports:
            self._pool.note_ready(number, time.monotonic())
            modules, seconds = report["modules"], report["seconds"]
            self._display.detail(f"spare {number} waits, with {modules} modules after {seconds:.1f} s")

    def _note_end(self, number: int, process: SpareProcess, status: ExitStatus, now: float) -> None:
        why = f"has failed with exit code {status.code}"
        if status.killed_by:
            why = f"was killed by signal {status.killed_by} ({signal_name(status.killed_by)})"
        elif not status.code:
            why = "has ended before it called hvd.init()"
        self._say(self._pool.note_end(number, why, now))
        del self._processes[number]
        self._unregister(process)
        process.clear()
        process.close()

    def _dismiss(self, process: SpareProcess) -> None:
        self._unregister(process)
        process.dismiss()
        self._dismissed.append(process)

    def _unregister(self, process: SpareProcess) -> None:
        if process.fileno() in self._selector.get_map():
            self._selector.unregister(process)

    def _say(self, text: str) -> None:
        if text:
            self._display.say(text)


def _leaves(process: SpareProcess, deadline: float) -> bool:
    """Waits until a spare closes its end of the connection, as its exit does; returns whether it has."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1e3) and process.reports() is None:
            return True
    return False
