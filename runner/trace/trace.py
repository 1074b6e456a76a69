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
    """An operation that ended with an error, such as "mismatch"; name and kind are numbers of texts.

    Attributes:
        track: that of its slices in the file.
        submitted: the rank's call, in nanoseconds of the row's clock.
        ended: when the rank learnt of the error, by the same clock.
        error: the text of the error, if it is a mismatch, with the values of the ranks; else "".
        place: the line of the program at which the rank learnt of it; "" if it is not known.
    """

    name: int
    kind: int
    bytes: int
    status: str
    track: int
    submitted: int
    ended: int
    error: str
    place: str


class Ending(NamedTuple):
    """A rank's failure report: why its world failed, by which rank's fault, and what the rank was doing.

    The recorder of a rank whose world runs has the status "ok".
    """

    status: str
    culprit: int
    reason: str
    doing: str

    @property
    def is_failure(self) -> bool:
        return self.status != "ok"


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
class ProcessRow:
    """A row of a file: a rank (in an elastic job, of a generation), or the changes of a worker.

    Attributes:
        pid: its process id in the file.
        rank: None for the changes of a worker.
        generation: that of an elastic job; 0 in other jobs.
        world_size: the number of ranks; 0 if the file does not say it.
        program: what the program did, by the track and the name of its slices.
        output_pid: its process id in a merged trace; the rank, unless the job is elastic.
        ending: its failure report; None if there is none.
        added: the events that come from its failure report, as its file would have them.
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
    ending: Ending | None = None
    added: list[bytes] = field(default_factory=list)

    def ends_of_tracks(self) -> dict[int, int]:
        """Returns the end of the last operation of each track."""
        ends = dict[int, int]()
        failed = ((operation.track, operation.ended) for operation in self.failed)
        for track, end in (*self.operations.ends_of_tracks(), *failed):
            ends[track] = max(end, ends.get(track, 0))
        return ends


@dataclass
class Trace:
    """All rows, in the order of the output; numbered texts; sentences about what the files lack."""

    rows: list[ProcessRow]
    texts: list[str]
    lacks: list[str]

    def generations(self) -> Iterator[list[ProcessRow]]:
        """Yields the rows of ranks of each generation, in the order of ranks."""
        ranks = defaultdict(list)
        for row in self.rows:
            if row.rank is not None:
                ranks[row.generation].append(row)
        for _, rows in sorted(ranks.items()):
            yield sorted(rows, key=lambda row: row.rank or 0)
