"""The states of a host's ranks, which these write to files while somebody watches (`bindings.state_file`)."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import psutil


class RankState(NamedTuple):
    """The last state of a rank: the contents of its file, and its process if that still runs."""

    values: dict[str, Any]
    process: psutil.Process | None

    @property
    def label(self) -> str:
        return str(self.values["rank"])

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.values["is_member"]


def read_states(folder: Path) -> list[RankState]:
    """Returns the ranks of this host, ascending.

    Processes of an elastic job have had the same rank one after another: the one that is up counts, or else
    the last.
    """
    found: dict[int, RankState] = {}
    for file in sorted(folder.glob("*.json"), key=_age_order):
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(file.read_text())
            rank = RankState(values, _running_process(values["pid"]))
            before = found.get(values["rank"])
            if before is None or rank.is_up or not before.is_up:
                found[values["rank"]] = rank
    return [found[number] for number in sorted(found)]


def _age_order(file: Path) -> float:
    """Returns when a file was written last; 0 for one that has gone."""
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
