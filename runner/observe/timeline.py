"""Merges the timelines of all ranks into FILE, and removes the files that they have written beside it.

hvdrun does this at the end of a job with --timeline-filename. To merge timelines that a script started:

    python -m sirtaki.runner.observe.timeline FILE

Each file becomes a row (a "process") of the result: in an elastic job, ranks are numbered anew in each
generation. A killed rank leaves a file without its end, and perhaps a partial line: all whole lines are used.
Times are those of the monotonic clock of the first file's host: times of other hosts are shifted by the
difference of their wall clocks, so they are as exact as these clocks agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.observe.timeline_events import EventFile, in_microseconds, write_events

_HEAD_LINES = 16  # a rank writes the difference of its clocks within these lines
ONE_HOST_NS = 20_000_000  # tolerated difference of two ranks of one host that have read the same two clocks
_TIME = re.compile(rb'"ts": ?([0-9]+)\.([0-9]{3})')  # microseconds, as the core writes them
_ROW = re.compile(rb'"(pid|sort_index)": ?[0-9]+')


def merge_timelines(path: Path) -> str:
    """Merges the ranks' timeline files, at `path` and beside it, into `path`, and removes the parts.

    If there are parts of an elastic job, an older file in `path` is the result of another merge, and is
    replaced.

    Returns whose timelines those were, such as "3 ranks" or "4 workers in 3 generations"; "" if there are
    none. Raises OSError where a file cannot be read or written, or where those of two jobs are.
    """
    parts = elastic_parts(path)
    files, others = [part.file(path) for part in parts], rank_files(path)
    if files and others and _newest(others) > _newest(files):
        raise FileExistsError(
            f"{max(others, key=_changed)} is newer than {files[0]} and the other files of an elastic job: "
            "remove those of one of the two jobs"
        )
    files = files or others
    if not files:
        return ""
    merged = merging_file(path)
    with open(merged, "wb") as out:
        write_events(out, _merged_events(files, parts))
    os.replace(merged, path)
    for file in files:
        if file != path:
            file.unlink()
    return describe_parts(parts) if parts else describe_ranks(len(files))


def _changed(file: Path) -> int:
    return file.stat().st_mtime_ns


def _newest(files: Sequence[Path]) -> int:
    """Returns when the last of these files was changed."""
    return max(map(_changed, files))


def merging_file(path: Path) -> Path:
    """Returns the file in which the result grows until it is complete."""
    return path.with_name(f"{path.name}.merging")


def _merged_events(files: Sequence[Path], parts: Sequence[TimelinePart]) -> Iterator[bytes]:
    """Yields the events of all files; `parts` describes the files of an elastic job in order, else empty."""
    clocks = [_wall_minus_monotonic(file) for file in files]
    first = next((clock for clock in clocks if clock is not None), None)
    for row, (file, clock) in enumerate(zip(files, clocks, strict=True)):
        offset = clock_offset(first, clock)
        for event in EventFile(file):
            placed = in_row(event, row, parts[row]) if parts else event
            yield shifted(placed, offset) if offset else placed


def in_row(event: bytes, row: int, part: TimelinePart) -> bytes:
    """Returns the event in a row of its own, which is named after the part."""
    placed = _ROW.sub(rb'"\1": %d' % row, event)
    if not part.generation or b'"process_name"' not in placed:
        return placed
    try:
        described = json.loads(placed)
        if described["name"] == "process_name":
            rank = described["args"]["name"]
            described["args"]["name"] = f"worker {part.worker}, generation {part.generation}: {rank}"
        return json.dumps(described).encode()
    except (ValueError, KeyError, TypeError):  # another program has written it
        return placed


def _wall_minus_monotonic(file: Path) -> int | None:
    """Returns the difference of a host's clocks, in nanoseconds; None if the file does not state it."""
    for event, _ in zip(EventFile(file), range(_HEAD_LINES), strict=False):
        if b'"clock"' in event:
            try:
                return int(json.loads(event)["args"]["wall_minus_monotonic_ns"])
            except (ValueError, KeyError, TypeError):
                return None
    return None


def clock_offset(first: int | None, clock: int | None) -> int:
    """Returns how many nanoseconds to add to a rank's times to convert them to the first host's clock."""
    if first is None or clock is None or abs(clock - first) < ONE_HOST_NS:
        return 0
    return clock - first


def shifted(event: bytes, offset: int) -> bytes:
    """Returns the event with all its times shifted by `offset` nanoseconds."""

    def shift(match: re.Match[bytes]) -> bytes:
        time = max(int(match[1] + match[2]) + offset, 0)
        return f'"ts":{in_microseconds(time)}'.encode()

    return _TIME.sub(shift, event)


def remove_timelines(path: Path) -> None:
    """Removes another job's files, so that they are not mistaken for this job's."""
    for file in [*rank_files(path), *(part.file(path) for part in elastic_parts(path))]:
        file.unlink()


# ---- The files of a job's timeline before the merge into a single file ---------------------------------
# Rank 0 writes FILE, and the others FILE.rank1, FILE.rank2, ... In an elastic job each worker writes a file
# for each generation that it takes part in, and one for the changes of the ranks: FILE.worker2.generation5,
# FILE.worker2.changes (sirtaki.bindings.observing.elastic_timeline).


_PART = re.compile(r"\.worker([0-9]+)\.(?:generation([0-9]+)|changes)$")


class TimelinePart(NamedTuple):
    """A file of an elastic job. The parts of a worker follow each other; its changes come first."""

    worker: int
    generation: int  # 0: the changes

    def file(self, timeline: Path) -> Path:
        """Returns the path of this part."""
        what = f"generation{self.generation}" if self.generation else "changes"
        return timeline.with_name(f"{timeline.name}.worker{self.worker}.{what}")


def rank_file(timeline: Path, rank: int) -> Path:
    """Returns the path of a rank's file in a non-elastic job."""
    return timeline.with_name(f"{timeline.name}.rank{rank}") if rank else timeline


def rank_files(timeline: Path) -> list[Path]:
    """Returns the files that ranks have written, in the order of ranks."""
    others = {}
    for file in timeline.parent.glob("*"):
        number = file.name.removeprefix(f"{timeline.name}.rank")
        if number != file.name and number.isdecimal():
            others[int(number)] = file
    return [file for file in (timeline, *(others[rank] for rank in sorted(others))) if file.is_file()]


def elastic_parts(timeline: Path) -> list[TimelinePart]:
    """Returns the parts that workers of an elastic job have written, in their order."""
    parts = {file: part_of(file) for file in timeline.parent.glob("*") if file.is_file()}
    # The name of a part begins with that of the timeline, and its numbers have no leading zeros.
    return sorted(part for file, part in parts.items() if part is not None and part.file(timeline) == file)


def part_of(file: Path) -> TimelinePart | None:
    """Returns the part of an elastic job that a file is by its name; None if it is none."""
    match = _PART.search(file.name)
    return TimelinePart(int(match[1]), int(match[2] or 0)) if match else None


def describe_ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def describe_parts(parts: Sequence[TimelinePart]) -> str:
    """Formats "4 workers in 3 generations"."""
    workers = len({part.worker for part in parts})
    generations = len({part.generation for part in parts if part.generation})
    return (
        f"{workers} {'worker' if workers == 1 else 'workers'} in "
        f"{generations} {'generation' if generations == 1 else 'generations'}"
    )


# ---- The timeline of a job of hvdrun -------------------------------------------------------------------


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


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m sirtaki.runner.observe.timeline FILE", file=sys.stderr)
        return 2
    try:
        whose = merge_timelines(Path(sys.argv[1]))
    except OSError as error:
        print(f"the timelines cannot be merged: {error}", file=sys.stderr)
        return 1
    if not whose:
        print(f"there are no timelines to merge into {sys.argv[1]}", file=sys.stderr)
        return 1
    print(f"{sys.argv[1]} holds the timelines of {whose}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
