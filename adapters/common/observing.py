"""Observability of a rank: statistics and timelines, equal for every framework."""

from __future__ import annotations

import os

from sirtaki.bindings.default_context import current
from sirtaki.bindings.observing import observe
from sirtaki.bindings.observing.observe import Lateness, Statistics

__all__ = ["Lateness", "Statistics", "start_timeline", "stats", "stop_timeline"]


def stats() -> Statistics:
    """Returns this rank's counters since init(), and each rank's lateness: `Statistics` documents fields and
    units.

    The call is cheap and local: other ranks need not make it.

    Raises:
        NotInitializedError: before init() or after shutdown() (a ValueError).
    """
    return observe.statistics(current())


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts writing the events of each operation to a file that Perfetto (https://ui.perfetto.dev) shows.

    Works at any time after init(), without an environment variable. Each rank that calls it writes its own
    file: rank 0 `file_path`, the others `file_path` with ".rank1" and so on. A timeline in progress is
    completed first. `hvdrun --timeline-filename` does this from the start, and merges the files.

    In an elastic job the timeline goes on when the ranks change: each process writes a file for each of its
    generations, `file_path`.worker<W>.generation<G>, and one for the changes of the ranks,
    `file_path`.worker<W>.changes. The training function may call this again each time it begins.

    Args:
        file_path: the file to create or overwrite.
        mark_cycles: also mark when this rank received a Decision of the coordinator.

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
