"""The timeline of a process that takes part in several worlds, as in an elastic job.

Each generation has a file of its own, because ranks are numbered anew: PATH.worker2.generation5, in which the
core writes the operations. PATH.worker2.changes has the changes of the ranks, in the same format and on the
same clock. No process writes to another one's files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from sirtaki.bindings.context import Context
from sirtaki.bindings.observing.observe import RankChange

_CHANGES, _DETECTION = 1, 2  # tracks; a change may be noticed while the first step after another one lasts


class ElasticTimeline:
    """A timeline that goes on in each world of this process."""

    def __init__(self, path: str, mark_decisions: bool) -> None:
        self.path = path
        self.mark_decisions = mark_decisions
        self._worker = 0
        self._has_begun = False
        self._context: Context | None = None  # the world whose file is being written
        self._is_wanted = True

    @property
    def is_running(self) -> bool:
        """Returns whether the timeline goes on in the next world."""
        return self._is_wanted

    def leave(self) -> None:
        """Ends the timeline, until `enter` is called again."""
        self._is_wanted, self._context = False, None

    def enter(self, context: Context) -> None:
        """Begins the file of a world. Does nothing if that has been done.

        Raises:
            OSError: the file cannot be written (a HorovodInternalError).
        """
        assert context.survivors is not None
        membership = context.survivors.membership
        self._is_wanted = True
        if membership is None or context is self._context:
            return
        self._worker = membership.workers[context.rank]
        file = f"{self.path}.worker{self._worker}.generation{membership.generation}"
        context.timeline.start(context, file, self.mark_decisions)
        self._context = context

    def add_change(
        self, change: RankChange, phases: Sequence[str], moments: Sequence[int], first_news: int
    ) -> None:
        """Writes a change, with its phases; `moments` are their borders, in nanoseconds.

        `first_news` is the moment of the first news of it, not after the first of these.
        """
        if first_news < moments[0]:
            of = {"generation": change["generation"]}
            self.add_slice("DETECT", first_news, moments[0], of, _DETECTION)
        facts = {name: value for name, value in change.items() if not name.endswith("_seconds")}
        self.add_slice(f"GENERATION {change['generation']}", moments[0], moments[-1], facts)
        for phase, begin, end in zip(phases, moments, moments[1:], strict=False):
            self.add_slice(phase, begin, end)

    def add_slice(
        self, name: str, begin: int, end: int, facts: dict[str, Any] | None = None, track: int = _CHANGES
    ) -> None:
        """Writes an event that has lasted from `begin` to `end`, in nanoseconds of the monotonic clock."""
        event = {"ph": "X", "name": name, "pid": self._worker, "tid": track, "args": facts or {}}
        times = f'"ts": {_in_microseconds(begin)}, "dur": {_in_microseconds(end - begin)}'
        if self._is_wanted:
            self._write(f"{json.dumps(event)[:-1]}, {times}}}")

    def _write(self, event: str) -> None:
        """Appends an event. A file that cannot be written is no reason to end a training."""
        text = ",\n".join([event] if self._has_begun else [*self._head(), event])
        try:
            path, mode = f"{self.path}.worker{self._worker}.changes", "a" if self._has_begun else "w"
            with open(path, mode, opener=_open_no_link) as file:
                file.write((",\n" if self._has_begun else "[\n") + text)
        except OSError as error:
            sys.stderr.write(f"sirtaki: the timeline of the changes of ranks cannot be written: {error}\n")
        self._has_begun = True

    def _head(self) -> list[str]:
        described: list[tuple[str, int, dict[str, Any]]] = [
            ("process_name", _CHANGES, {"name": f"worker {self._worker}: changes of the ranks"}),
            ("process_sort_index", _CHANGES, {"sort_index": self._worker}),
            ("thread_name", _CHANGES, {"name": "Changes of the ranks"}),
            ("thread_name", _DETECTION, {"name": "Detection of changes"}),
            ("clock", _CHANGES, {"wall_minus_monotonic_ns": time.time_ns() - time.monotonic_ns()}),
        ]
        return [
            json.dumps({"ph": "M", "name": what, "pid": self._worker, "tid": track, "args": names})
            for what, track, names in described
        ]


def _in_microseconds(nanoseconds: int) -> str:
    """Returns a time in the unit of the format."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


# ---- The changes of the ranks of an elastic job, in a file beside the failure reports of the core ------


def write_changes(context: Context, changes: Sequence[RankChange]) -> None:
    """Writes this process's changes so far to `dump_directory`, if set, as changes.worker<N>.json.

    A file that cannot be written is no reason to end a training: it costs a line.
    """
    folder = context.setting("dump_directory")
    survivors = context.survivors
    if not folder or survivors is None or survivors.membership is None:
        return
    path = os.path.join(folder, f"changes.worker{survivors.membership.workers[context.rank]}.json")
    fresh = f"{path}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW  # others may be able to write to this folder
    try:
        os.makedirs(folder, exist_ok=True)
        if os.path.lexists(fresh):
            os.unlink(fresh)
        with open(os.open(fresh, flags, 0o666), "w") as file:
            json.dump(list(changes), file)
        os.replace(fresh, path)
    except OSError as error:
        sys.stderr.write(f"sirtaki: the changes of the ranks could not be written to {path}: {error}\n")
