"""Operations that ended with an error, joined over the ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from sirtaki.runner.trace.formats import ranks_text
from sirtaki.runner.trace.trace import Failed, ProcessRow, Trace

MISMATCH = "mismatch"


@dataclass
class Disagreement:
    """The n-th failed operation of a name. A refused operation has no plan, so its name and order join it.

    Attributes:
        submitted: the kind of the call and the bytes of the tensor, by rank.
        parts: the operation of each rank, with its row.
    """

    name: str
    generation: int
    submitted: dict[int, tuple[str, int]] = field(default_factory=dict)
    parts: list[tuple[ProcessRow, Failed]] = field(default_factory=list)

    @property
    def statuses(self) -> set[str]:
        return {failed.status for _, failed in self.parts}

    @property
    def is_mismatch(self) -> bool:
        return MISMATCH in self.statuses

    @property
    def error(self) -> str:
        """The text of the error; "" if no file has it."""
        return next((failed.error for _, failed in self.parts if failed.error), "")

    @property
    def places(self) -> dict[int, str]:
        """Returns by rank the program line that received the error, where the reports have it."""
        return {row.rank or 0: failed.place for row, failed in self.parts if failed.place}

    @property
    def submitted_text(self) -> str:
        """Formats "rank 0 all-reduce of 24 bytes, rank 1 all-reduce of 32 bytes"."""
        return ", ".join(
            f"rank {rank} {kind} of {size} bytes" for rank, (kind, size) in sorted(self.submitted.items())
        )

    @property
    def places_text(self) -> str:
        """Formats "ranks 0-2 at train.py:7, rank 3 in step() at train.py:9"."""
        by_place = defaultdict(list)
        for rank, place in sorted(self.places.items()):
            by_place[place].append(rank)
        return ", ".join(f"{ranks_text(ranks)} {place}" for place, ranks in by_place.items())


def failures(trace: Trace) -> Iterator[Disagreement]:
    """Yields the failed operations of all generations."""
    for rows in trace.generations():
        found: dict[tuple[int, int], Disagreement] = {}
        for row in rows:
            seen: Counter[int] = Counter()
            for failed in row.failed:
                key = (failed.name, seen[failed.name])
                seen[failed.name] += 1
                disagreement = found.setdefault(key, Disagreement(trace.texts[failed.name], row.generation))
                disagreement.submitted[row.rank or 0] = (trace.texts[failed.kind], failed.bytes)
                disagreement.parts.append((row, failed))
        yield from found.values()
