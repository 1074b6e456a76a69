"""The time in which a rank waits for an exchange, with nothing to hide it, and the cause of that wait.

No file records when a program waits. But a program that submits another operation was not waiting. So the
exchanges of a rank in a step are taken in *bursts*, in each of which at least one is in flight at any time.
A burst is *exposed* from the last submission in it to its end. That time has three parts: until the last rank
has submitted (wait), until all ranks know that all agree (decision), and until the rank has all results
(transfer). While data of the burst moves, no decision is waited for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sirtaki.runner.trace.exchanges import Exchange


class _Part(NamedTuple):
    """A rank's part of an exchange: own moments, and those of the last rank, with its position."""

    submitted: int
    ended: int
    arrived: int  # all ranks have submitted
    last: int
    decided: int  # all ranks know that
    last_informed: int


@dataclass
class Exposure:
    """A rank's exchanges in a step, in nanoseconds: in flight, and exposed for three reasons.

    Attributes:
        caused_by: the wait, by the rank that submitted last.
        informed_by: the decision, by the rank that was informed last.
    """

    in_flight: int = 0
    exposed: int = 0
    transfer: int = 0
    caused_by: Counter[int] = field(default_factory=Counter)
    informed_by: Counter[int] = field(default_factory=Counter)

    @property
    def wait(self) -> int:
        return self.caused_by.total()

    @property
    def decision(self) -> int:
        return self.informed_by.total()


def exposures(step: Iterable[Exchange]) -> dict[int, Exposure]:
    """Returns the exposure of each rank in a step, by the position of its row."""
    parts = defaultdict(list)
    for exchange in step:
        last = exchange.last
        informed = max(exchange.parts, key=lambda row: (exchange.parts[row].decided, -row))
        moments = (exchange.parts[last].submitted, last, exchange.parts[informed].decided, informed)
        for row, operation in exchange.parts.items():
            parts[row].append(_Part(operation.submitted, operation.ended, *moments))
    return {row: _exposure(sorted(of_row)) for row, of_row in parts.items()}


def _exposure(parts: Iterable[_Part]) -> Exposure:
    found = Exposure()
    for burst in _bursts(parts):
        end = max(part.ended for part in burst)
        begin = burst[-1].submitted  # of the exposed time
        slowest = max(burst, key=lambda part: part.arrived)
        arrived = min(max(slowest.arrived, begin), end)
        last_decided = max(burst, key=lambda part: part.decided)
        decided = min(max(last_decided.decided, arrived), end)
        moving = _moving(burst, arrived, decided)
        found.in_flight += end - burst[0].submitted
        found.exposed += end - begin
        found.caused_by[slowest.last] += arrived - begin
        found.informed_by[last_decided.last_informed] += decided - arrived - moving
        found.transfer += end - decided + moving
    return found


def _moving(burst: Iterable[_Part], begin: int, end: int) -> int:
    """Returns how long data moves between two moments: later plans may be decided when earlier ones end."""
    total, until = 0, begin
    for part in sorted(burst, key=lambda part: part.decided):
        first, last = max(part.decided, until), min(part.ended, end)
        if last > first:
            total += last - first
            until = last
    return total


def _bursts(parts: Iterable[_Part]) -> Iterator[Sequence[_Part]]:
    """Yields parts that overlap, directly or through others, in the order of submission."""
    burst, end = list[_Part](), 0
    for part in parts:
        if burst and part.submitted > end:
            yield burst
            burst, end = [], 0
        burst.append(part)
        end = max(end, part.ended)
    if burst:
        yield burst
