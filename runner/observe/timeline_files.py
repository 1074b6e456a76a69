"""The files of a job's timeline before the merge into a single file.

Rank 0 writes FILE, and the others FILE.rank1, FILE.rank2, ... In an elastic job each worker writes a file for
each generation that it takes part in, and one for the changes of the ranks: FILE.worker2.generation5,
FILE.worker2.changes (sirtaki.bindings.observing.elastic_timeline).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PART = re.compile(r"\.worker([0-9]+)\.(?:generation([0-9]+)|changes)")


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
    found = []
    for file in timeline.parent.glob("*"):
        if file.name.startswith(timeline.name) and file.is_file():
            match = _PART.fullmatch(file.name[len(timeline.name) :])
            part = TimelinePart(int(match[1]), int(match[2] or 0)) if match else None
            if part is not None and part.file(timeline) == file:  # its numbers have no leading zeros
                found.append(part)
    return sorted(found)


def part_of(file: Path) -> TimelinePart | None:
    """Returns the part of an elastic job that a file is by its name; None if it is none."""
    match = re.search(f"{_PART.pattern}$", file.name)
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
