"""The spares of a host, held by hvdrun or the host's agent; the job's pool decides how many there are."""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from sirtaki.bindings.bootstrap.connection.wire import (
    FROM,
    NO_RANK,
    Frame,
    MessageKind,
    Sender,
    WireError,
    take_frame,
)
from sirtaki.bindings.bootstrap.elastic import spare_start
from sirtaki.bindings.bootstrap.elastic.loaded_modules import list_path
from sirtaki.bindings.bootstrap.elastic.spare import SPARE, instructions
from sirtaki.bindings.bootstrap.job import WORKER
from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.process import RankProcess
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.supervise.failure_analysis import ExitStatus, killed_by

_FIELDS = [field.name.upper() for field in fields(RankPlacement)]
_PLACE = {WORKER, *(f"{prefix}_{name}" for prefix in ("SIRTAKI", "HOROVOD") for name in _FIELDS)}
_READ_BYTES = 65536


class SpareProcess(RankProcess):
    """A spare: a process with the user's command, which waits for its place before it runs the program."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        runs_script: bool,
        reaper: Reaper,
    ) -> None:
        """Starts the spare. Raises OSError and LaunchError as `RankProcess` does.

        Args:
            command: the path of the program, and its arguments, for which `why_no_spare` returns "".
            environment: that of any worker of this host; its place is left out.
            folder: the job's folder on this host.
            runs_script: whether it waits in `hvd.init()`, and not before the program.
            reaper: the reaper of this host.
        """
        self._base = {name: value for name, value in environment.items() if name not in _PLACE}
        self._orders, theirs = socket.socketpair()
        self._received = bytearray()
        theirs.set_inheritable(True)
        start = os.path.dirname(os.path.abspath(spare_start.__file__))
        variables = {
            **self._base,
            SPARE: instructions(theirs.fileno(), list_path(str(folder)), runs_script),
            "PYTHONPATH": os.pathsep.join(filter(None, (start, self._base.get("PYTHONPATH")))),
        }
        if runs_script:
            variables[WORKER] = ""  # hvd.init() has to know that it is in an elastic job
        try:
            super().__init__(NO_RANK, command, variables, reaper)
        except BaseException:
            self._orders.close()
            raise
        finally:
            theirs.close()
        self._orders.setblocking(False)

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when the spare reports something, or has ended."""
        return self._orders.fileno()

    def reports(self) -> list[list[Any]] | None:
        """Returns the spare's reports since the last call: number of imported modules, seconds of the import.

        Returns None if it has ended, or is killed because the program writes to its connection.
        """
        try:
            data = self._orders.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            return None
        self._received += data
        reports = []
        try:
            while (frame := take_frame(self._received, FROM[Sender.STANDBY])) is not None:
                reports.append(frame.fields(modules=int, seconds=float))
        except WireError:
            self.signal(signal.SIGKILL)
            return None
        return reports

    def assign(self, rank: int, environment: Mapping[str, str]) -> bool:
        """Sends the spare its place: the rank under which its output is shown, and a worker's environment.

        Returns whether it can have received that: it may have ended.
        """
        place: dict[str, str | None] = dict.fromkeys(self._base.keys() - environment.keys())
        place |= {name: value for name, value in environment.items() if self._base.get(name) != value}
        try:
            self._orders.send(Frame.of(MessageKind.PLACE, place).pack())
        except OSError:
            return False
        self.rank = rank
        self._orders.close()
        return True

    def dismiss(self) -> None:
        """Dismisses the spare: it exits with code 0. Reports that it sent earlier may still arrive."""
        try:
            self._orders.shutdown(socket.SHUT_WR)
        except OSError:  # it has ended
            return

    def close(self) -> None:
        self._orders.close()


# ---- The spares of a host ------------------------------------------------------------------------------

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
