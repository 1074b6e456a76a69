"""Operations that ended with an error, joined over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from sirtaki.runner.trace.trace import Trace

_MISMATCH = "mismatch"


@dataclass
class Disagreement:
    """The n-th failed operation of a name. A refused operation has no plan, so its name and order join it.

    Attributes:
        submitted: the kind of the call and the bytes of the tensor, by rank.
    """

    name: str
    generation: int
    statuses: set[str] = field(default_factory=set)
    submitted: dict[int, tuple[str, int]] = field(default_factory=dict)

    @property
    def is_mismatch(self) -> bool:
        return _MISMATCH in self.statuses


def failures(trace: Trace) -> Iterator[Disagreement]:
    """Yields the failed operations of all generations."""
    for rows in trace.generations():
        found: dict[tuple[int, int], Disagreement] = {}
        for row in rows:
            seen: Counter[int] = Counter()
            for failed in row.failed:
                key = (failed.name, seen[failed.name])
                seen[failed.name] += 1
                one = found.setdefault(key, Disagreement(trace.texts[failed.name], row.generation))
                one.statuses.add(failed.status)
                one.submitted[row.rank or 0] = (trace.texts[failed.kind], failed.bytes)
        yield from found.values()
