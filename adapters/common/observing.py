"""What a rank does, made visible: statistics and timelines, alike for every framework."""

from __future__ import annotations

import os

from sirtaki._core import observe
from sirtaki._core.current import current
from sirtaki._core.observe import Lateness, Statistics

__all__ = ["Lateness", "Statistics", "start_timeline", "stats", "stop_timeline"]


def stats() -> Statistics:
    """What this rank has done since init(), and who comes late: see `Statistics` for each field and its unit.

    Cheap, and only this rank's own business: other ranks need not call it.

    Raises:
        NotInitializedError: before init() or after shutdown() (a ValueError).
    """
    return observe.statistics(current())


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begins to write what becomes of each operation to a file that Perfetto (https://ui.perfetto.dev) shows.

    Works at any time after init(), without an environment variable. Each rank that calls it writes its own
    file: rank 0 `file_path`, the others `file_path` with ".rank1" and so on. One that is being written is
    completed first. `hvdrun --timeline-filename` does this from the start, and makes one file of all.

    Args:
        file_path: of a file that is to be made or overwritten.
        mark_cycles: also mark when this rank heard a Decision of the coordinator's.

    Raises:
        NotInitializedError: before init() or after shutdown() (a ValueError).
        OSError: the file cannot be written (a HorovodInternalError).
    """
    observe.start_timeline(current(), os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Completes the timeline's file; does nothing if none is being written. shutdown() does the same.

    Raises:
        NotInitializedError: before init() or after shutdown() (a ValueError).
    """
    observe.stop_timeline(current())
