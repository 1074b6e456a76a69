"""The states of a job's ranks, which these write to files while somebody watches (`observing.state_file`).

Those of ranks on other hosts are in files beside them on hvdrun's host (`remote_states`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from sirtaki.bindings.observing.watch_marks import REMOTE
from sirtaki.runner.observe.state_shape import own_state, process_shape, remote_state


class ProcessState(NamedTuple):
    """A running process: its start in Unix time (`begin`), and its CPU time and resident memory."""

    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    is_stopped: bool = False
    begin: float = 0.0


class RankState(NamedTuple):
    """The last state of a rank: the checked contents of its file, and its process if that still runs.

    Attributes:
        process: None for ranks of other hosts, too.
        remote: the process on another host.
    """

    values: dict[str, Any]
    process: psutil.Process | None
    remote: ProcessState | None = None

    @property
    def label(self) -> str:
        return str(self.values["rank"])

    @property
    def is_up(self) -> bool:
        return bool(self.process or self.remote) and self.values["is_member"]

    def process_state(self) -> ProcessState:
        """Returns the state of the process now, or when its host sent it; zeros if it has ended."""
        if self.process is not None:
            with contextlib.suppress(psutil.Error), self.process.oneshot():
                times, memory = self.process.cpu_times(), self.process.memory_info().rss
                is_stopped = self.process.status() == psutil.STATUS_STOPPED
                begin = self.process.create_time()
                return ProcessState(times.user + times.system, memory, is_stopped, begin)
        return self.remote or ProcessState()


def read_states(folder: Path) -> list[RankState]:
    """Returns the ranks of this host, ascending.

    Processes of an elastic job have had the same rank one after another: the one that is up counts, or else
    the last.
    """
    return _by_rank(_own_states(folder))


def read_job(folder: Path) -> list[RankState]:
    """Works like `read_states`, with the ranks of other hosts that hvdrun has stored in `REMOTE`."""
    return _by_rank([*_own_states(folder), *_remote_states(folder / REMOTE)])


def _by_rank(states: Iterable[RankState]) -> list[RankState]:
    found: dict[int, RankState] = {}
    for rank in states:
        before = found.get(rank.values["rank"])
        if before is None or rank.is_up or not before.is_up:
            found[rank.values["rank"]] = rank
    return [found[number] for number in sorted(found)]


def _own_states(folder: Path) -> Iterator[RankState]:
    for contents in _contents(folder):
        with contextlib.suppress(ValueError):
            values = own_state(contents)
            yield RankState(values, _running_process(values["pid"]))


def _remote_states(folder: Path) -> Iterator[RankState]:
    for contents in _contents(folder):
        with contextlib.suppress(ValueError):
            process = contents.get("process")
            remote = None if process is None else ProcessState(**process_shape(process))
            yield RankState(remote_state(contents), None, remote)


def _contents(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the contents of a folder's files, the oldest first."""
    for file in sorted(folder.glob("*.json"), key=_age_order):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            contents = json.loads(file.read_text())
            if isinstance(contents, dict):
                yield contents


def _age_order(file: Path) -> float:
    """Returns the time of a file's last change; 0 for a file that is gone."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _running_process(pid: int) -> psutil.Process | None:
    """Returns a process unless it has ended: hvdrun keeps a zombie of each rank until the job ends."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return process
    return None
