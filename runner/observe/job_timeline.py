"""The timeline that hvdrun was asked for: checked before ranks start, and merged when all have ended."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.observe.timeline import (
    TimelinePart,
    merge_timelines,
    merging_file,
    rank_file,
    remove_timelines,
)

_LEFT_FREE = 1 << 30  # bytes of the file system that other hosts cannot fill


@dataclass
class JobTimeline:
    """The timeline. Ranks of this host write their files beside `path`; other hosts send theirs at the
    end.
    """

    path: Path
    _is_cut: bool = field(default=False, init=False)

    def prepare(self) -> None:
        """Removes the files of another job. Raises LaunchError if the timeline cannot be written."""
        failure = ""
        try:
            if self.path.exists() and not self.path.is_file():
                failure = "it is no regular file"
            else:
                merging_file(self.path).touch()
                merging_file(self.path).unlink()
                remove_timelines(self.path)
        except OSError as error:
            failure = error.strerror or str(error)
        if failure:
            raise LaunchError(f"the timeline cannot be written to '{self.path}': {failure}", 1)

    def append(self, rank: int, piece: bytes) -> None:
        """Stores a piece of the file of a rank on another host."""
        self._append(rank_file(self.path, rank), piece)

    def append_part(self, part: TimelinePart, piece: bytes) -> None:
        """Stores a piece of a part that a worker on another host has written."""
        self._append(part.file(self.path), piece)

    def merge(self, why_none: str = "no rank has called hvd.init()") -> str:
        """Merges all files; returns the line for the user. `why_none` is its reason if there are none."""
        try:
            whose = merge_timelines(self.path)
        except OSError as error:
            return f"the timelines of the ranks could not be merged: {error}"
        if not whose:
            return f"there is no timeline in {self.path}: {why_none}"
        shown = f"the timeline of {whose} is in {self.path}; https://ui.perfetto.dev shows it"
        if self._is_cut:
            shown += ". The ends of files from other hosts are missing: the disk was nearly full"
        return shown

    def _append(self, file: Path, piece: bytes) -> None:
        with contextlib.suppress(OSError):  # merging will report it
            self._is_cut |= shutil.disk_usage(file.parent).free < _LEFT_FREE
            if not self._is_cut:
                with open(file, "ab") as opened:
                    opened.write(piece)
