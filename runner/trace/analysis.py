"""The measures of a trace: its steps, the ranks and the tensors."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sirtaki.runner.trace.clocks import HostClock
from sirtaki.runner.trace.doings import Doing, Window, doings
from sirtaki.runner.trace.trace import Exchange, ProcessRow, Trace, exchanges

LATE, SLOW_DECISION, SLOW_TRANSFER = "late compute", "slow decision", "slow transfer"
_CAUSE_SHARE = 0.1  # of a step's time: a smaller part is no cause
_MOST = 0.8  # of the wait for a rank


@dataclass
class Step:
    """A step, in nanoseconds. All but `wall` are means over ranks.

    Attributes:
        number: from 1, in each generation.
        wall: from the end of the step before, which is that of its last exchange on any rank, to its own end;
            the first one begins with its first submission.
        in_flight, exposed: time with exchanges in flight, and the part of it that nothing hides.
        wait: exposed until the last rank has submitted; the mean over the ranks that wait for another one.
        decision, transfer: exposed until all ranks know that all agree, and until the rank has the results.
        rank: the critical rank, which was last to submit or to know; None if there is no such rank.
        cause: the largest of the three, if it matters, else "".
    """

    generation: int
    number: int
    wall: int
    in_flight: float = 0
    exposed: float = 0
    wait: float = 0
    decision: float = 0
    transfer: float = 0
    rank: int | None = None
    cause: str = ""


class LateStep(NamedTuple):
    """A step in which a rank was critical because it submitted late, and how long the other ranks waited.

    Attributes:
        at_first: its first submission was late already.
        alone: the longest time in which all others had submitted an operation, by the clock of its host.
    """

    number: int
    wait: float
    at_first: bool
    alone: Window


@dataclass
class RankMeasures:
    """A rank in all steps of a generation, in nanoseconds.

    Attributes:
        caused: how long the others waited for it, on average.
        waited, exposed: its own wait for others, and all its exposed time.
        times_last: the number of exchanges that it submitted after all others.
        late_steps: the steps in which it was critical because it submitted late.
    """

    row: ProcessRow
    caused: float = 0
    waited: int = 0
    exposed: int = 0
    times_last: int = 0
    late_steps: list[LateStep] = field(default_factory=list)

    def worst_steps(self) -> list[LateStep]:
        """Returns the fewest late steps that have most of their wait, in order."""
        total, taken, found = sum(step.wait for step in self.late_steps), 0.0, list[LateStep]()
        for step in sorted(self.late_steps, key=lambda step: -step.wait):
            if taken >= _MOST * total:
                break
            found.append(step)
            taken += step.wait
        return sorted(found)

    def doings(self) -> list[Doing]:
        """Returns what the rank's program did in its worst steps while the other ranks waited."""
        return doings([*self.row.program.values()], [step.alone for step in self.worst_steps()])


@dataclass
class TensorMeasures:
    """All exchanges of a name.

    By rank, the wait (last submission - own submission) and the transfer (end - last submission), in
    nanoseconds.
    """

    name: int
    kind: int
    count: int = 0
    bytes: int = 0
    waits: array[int] = field(default_factory=lambda: array("q"))
    transfers: array[int] = field(default_factory=lambda: array("q"))

    def add(self, exchange: Exchange) -> None:
        arrived = exchange.parts[exchange.last].submitted
        self.count += 1
        for part in exchange.parts.values():
            self.bytes = max(self.bytes, part.bytes)
            self.waits.append(arrived - part.submitted)
            self.transfers.append(max(part.ended - arrived, 0))


@dataclass
class Measures:
    """All measures; `incomplete` counts the exchanges that the files do not have of all ranks."""

    steps: list[Step] = field(default_factory=list)
    ranks: list[RankMeasures] = field(default_factory=list)
    tensors: dict[int, TensorMeasures] = field(default_factory=dict)
    exchanges: int = 0
    incomplete: int = 0

    @property
    def wall(self) -> int:
        return sum(step.wall for step in self.steps)


def measure(trace: Trace, clocks: Sequence[HostClock]) -> Measures:
    """Measures all generations. Raises LaunchError if the rows are not from the same job."""
    offset_of = {id(row): clock.offset for clock in clocks for row in clock.rows}
    found = Measures()
    for rows in trace.generations():
        _Generation(rows, [offset_of[id(row)] for row in rows], found).measure()
    return found


class _Generation:
    """Measures the rows of a generation, and adds them to the measures of the trace."""

    def __init__(self, rows: Sequence[ProcessRow], offsets: Sequence[int], found: Measures) -> None:
        self._rows, self._offsets, self._found = rows, offsets, found
        self._ranks = [RankMeasures(row) for row in rows]
        self._incomplete = 0  # exchanges, counted anew in each pass

    def measure(self) -> None:
        tensors = find_step_tensors(self._complete()).tensors
        end = 0  # of the step before
        for number, step in split_into_steps(self._complete(), tensors):
            for exchange in step:
                self._add_exchange(exchange)
            if number:
                self._add_step(number, step, end)
                end = max(end, _last_end(step))
        self._found.incomplete += self._incomplete
        self._found.ranks += self._ranks

    def _complete(self) -> Iterator[Exchange]:
        self._incomplete = 0
        for exchange in exchanges(self._rows, self._offsets):
            if exchange.is_complete:
                yield exchange
            else:
                self._incomplete += 1

    def _add_exchange(self, exchange: Exchange) -> None:
        parts, last = exchange.parts, exchange.last
        others = [part.submitted for row, part in parts.items() if row != last]
        if others and parts[last].submitted > max(others):
            self._ranks[last].times_last += 1
        kind = parts[last].kind
        self._found.exchanges += 1
        self._found.tensors.setdefault(exchange.name, TensorMeasures(exchange.name, kind)).add(exchange)

    def _add_step(self, number: int, exchanged: Sequence[Exchange], previous_end: int) -> None:
        by_row = exposures(exchanged)
        first = {row: _first_submission(exchanged, row) for row in by_row}
        begin = previous_end or min(first.values())
        step = Step(self._rows[0].generation, number, max(_last_end(exchanged) - begin, 0))
        step.in_flight = statistics.fmean(exposure.in_flight for exposure in by_row.values())
        step.exposed = statistics.fmean(exposure.exposed for exposure in by_row.values())
        step.decision = statistics.fmean(exposure.decision for exposure in by_row.values())
        step.transfer = statistics.fmean(exposure.transfer for exposure in by_row.values())
        waiting = max(len(by_row) - 1, 1)
        step.wait = sum(exposure.wait for exposure in by_row.values()) / waiting
        caused = _total(exposure.caused_by for exposure in by_row.values())
        for row, exposure in by_row.items():
            self._ranks[row].waited += exposure.wait
            self._ranks[row].exposed += exposure.exposed
            self._ranks[row].caused += caused[row] / waiting
        critical = _critical_row(step, caused, by_row)
        if critical is not None:
            step.rank = self._rows[critical].rank
            if step.cause == LATE:
                alone = _longest_alone(exchanged, critical, self._offsets[critical])
                self._note_late(critical, step, first, alone)
        self._found.steps.append(step)

    def _note_late(self, row: int, step: Step, first: Mapping[int, int], alone: Window) -> None:
        others = [moment for other, moment in first.items() if other != row]
        at_first = first[row] - statistics.median(others) >= step.wait / 2
        self._ranks[row].late_steps.append(LateStep(step.number, step.wait, at_first, alone))


def _critical_row(step: Step, caused: Counter[int], by_row: Mapping[int, Exposure]) -> int | None:
    """Sets the cause of a step; returns the index of its critical row, None if there is no such row."""
    parts = {LATE: step.wait, SLOW_DECISION: step.decision, SLOW_TRANSFER: step.transfer}
    cause = max(parts, key=lambda name: parts[name])
    if parts[cause] < _CAUSE_SHARE * step.wall or not parts[cause]:
        return None
    step.cause = cause
    if cause == SLOW_TRANSFER:  # all ranks move the data, and no file tells which of them is slow
        return None
    blamed = caused if cause == LATE else _total(exposure.informed_by for exposure in by_row.values())
    return max(blamed, key=lambda row: (blamed[row], -row))


def _longest_alone(step: Sequence[Exchange], row: int, offset: int) -> Window:
    """Returns the longest window in which every other rank had submitted an operation, and this row had not.

    `offset` is that of the row's clock, by which the exchanges are moved.
    """
    alone = Window(0, 0)
    for exchange in step:
        if exchange.last == row:
            end = exchange.parts[row].submitted
            begin = max(
                (part.submitted for other, part in exchange.parts.items() if other != row), default=end
            )
            alone = max(
                alone, Window(begin - offset, end - offset), key=lambda window: window.end - window.begin
            )
    return alone


def _total(counters: Iterator[Counter[int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _first_submission(step: Sequence[Exchange], row: int) -> int:
    return min(exchange.parts[row].submitted for exchange in step if row in exchange.parts)


def _last_end(step: Sequence[Exchange]) -> int:
    return max(part.ended for exchange in step for part in exchange.parts.values())


# ---- The steps of a training ---------------------------------------------------------------------------
# No file records where a step of the optimizer ends, but each step exchanges the same tensors. So the *step
# tensors* are the names of a process set that were exchanged equally often: of all such numbers, the number
# with which most bytes were exchanged. The n-th exchange of each of them belongs to step n, which begins with
# the first of these in the order of plans. Any other exchange belongs to the step in which it comes, and
# exchanges before the first step to none.


Tensor = tuple[int, int]  # process set, number of the name


class StepTensors(NamedTuple):
    """The tensors that each step exchanges once, and the number of steps."""

    tensors: frozenset[Tensor]
    steps: int


def find_step_tensors(found: Iterable[Exchange]) -> StepTensors:
    """Returns the step tensors of a generation, from all its exchanges."""
    counts: Counter[Tensor] = Counter()
    sizes: Counter[Tensor] = Counter()
    for exchange in found:
        tensor = (exchange.process_set, exchange.name)
        counts[tensor] += 1
        sizes[tensor] += 1 + max(part.bytes for part in exchange.parts.values())  # a barrier has no bytes
    weights: Counter[tuple[int, int]] = Counter()  # by process set and number of exchanges
    for tensor, count in counts.items():
        weights[tensor[0], count] += sizes[tensor]
    if not weights:
        return StepTensors(frozenset(), 0)
    process_set, steps = max(weights, key=lambda key: (weights[key], key))
    chosen = (tensor for tensor, count in counts.items() if tensor[0] == process_set and count == steps)
    return StepTensors(frozenset(chosen), steps)


def split_into_steps(
    found: Iterable[Exchange], tensors: frozenset[Tensor]
) -> Iterator[tuple[int, list[Exchange]]]:
    """Yields the number of each step, from 1, and its exchanges; 0 for exchanges before the first step."""
    seen: Counter[Tensor] = Counter()
    number, current = 0, list[Exchange]()
    for exchange in found:
        tensor = (exchange.process_set, exchange.name)
        if tensor in tensors:
            seen[tensor] += 1
            if seen[tensor] > number:
                if current:
                    yield number, current
                number, current = seen[tensor], []
        current.append(exchange)
    if current:
        yield number, current


# The time in which a rank waits for an exchange, with nothing to hide it, and the cause of that wait.
#
# No file records when a program waits. But a program that submits another operation was not waiting. So the
# exchanges of a rank in a step are taken in *bursts*, in each of which at least one is in flight at any time.
# A burst is *exposed* from the last submission in it to its end. That time has three parts: until the
# last rank has submitted (wait), until all ranks know that all agree (decision), and until the rank has all
# results (transfer). While data of the burst moves, no decision is waited for.


class _Part(NamedTuple):
    """A rank's part of an exchange: its own times, the times of the last rank, and the index of that rank."""

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
    """Returns how long data moves between `begin` and `end`; overlapping parts count once."""
    total, until = 0, begin
    for part in sorted(burst, key=lambda part: part.decided):
        first, last = max(part.decided, until), min(part.ended, end)
        if last > first:
            total += last - first
            until = last
    return total


def _bursts(parts: Iterable[_Part]) -> Iterator[Sequence[_Part]]:
    """Yields groups of parts that overlap, directly or transitively, in the order of submission."""
    burst, end = list[_Part](), 0
    for part in parts:
        if burst and part.submitted > end:
            yield burst
            burst, end = [], 0
        burst.append(part)
        end = max(end, part.ended)
    if burst:
        yield burst
