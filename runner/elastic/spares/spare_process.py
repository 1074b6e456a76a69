"""A process that hvdrun, or its agent, starts as a spare on its own host."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

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
from sirtaki.runner.launch.process import RankProcess
from sirtaki.runner.launch.reaper import Reaper

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
