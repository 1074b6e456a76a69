"""A trace: the rows of all files, each of a rank, and what the files lack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sirtaki.runner.trace.doings import Slices
from sirtaki.runner.trace.operations import Operations
from sirtaki.runner.trace.sources import Source


class Failed(NamedTuple):
    """An operation that ended with an error, such as "mismatch"; name and kind are numbers of texts."""

    name: int
    kind: int
    bytes: int
    status: str


class StatedClock(NamedTuple):
    """The clock that a file states for a row, in nanoseconds.

    Attributes:
        wall_minus_monotonic: the difference of the host's clocks; None if it is not stated.
        is_merged: whether `sirtaki trace merge` has written the row.
        offset, error: how far it has moved the row's times, and by how much that may be wrong; None if
            that is not known.
    """

    wall_minus_monotonic: int | None = None
    is_merged: bool = False
    offset: int = 0
    error: int | None = None


@dataclass
class Row:
    """A process of a file: a rank, in an elastic job in one generation, or the changes of a worker.

    Attributes:
        pid: its process id in the file.
        rank: None for the changes of a worker.
        generation: that of an elastic job; 0 in other jobs.
        world_size: the number of ranks; 0 if the file does not say it.
        program: what the program did, by the track and the name of its slices.
        output_pid: its process id in a merged trace; the rank, unless the job is elastic.
    """

    source: Source
    pid: int
    title: str
    host: str = ""
    rank: int | None = None
    generation: int = 0
    world_size: int = 0
    clock: StatedClock = field(default_factory=StatedClock)
    operations: Operations = field(default_factory=Operations)
    failed: list[Failed] = field(default_factory=list)
    program: dict[tuple[int, str], Slices] = field(default_factory=dict)
    output_pid: int = 0


@dataclass
class Trace:
    """All rows, in the order of the output; numbered texts; sentences about what the files lack."""

    rows: list[Row]
    texts: list[str]
    lacks: list[str]

    def generations(self) -> Iterator[list[Row]]:
        """Yields the rows of ranks of each generation, in the order of ranks."""
        ranks = defaultdict(list)
        for row in self.rows:
            if row.rank is not None:
                ranks[row.generation].append(row)
        for _, rows in sorted(ranks.items()):
            yield sorted(rows, key=lambda row: row.rank or 0)
