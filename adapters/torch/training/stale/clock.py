"""The rules by which all ranks make the same updates, each from the same reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class ClockReport(NamedTuple):
    """The state of a rank, which all ranks receive in the same round.

    Attributes:
        contributed: number of gradients that it has handed over.
        base: number of updates in the parameters with which it computes now; the number of all updates if
            it computes nothing.
        is_computing: whether it is between two steps, not inside one.
        has_ended: whether it has no steps left.
        applied: number of updates that it has applied.
        options: a checksum of the hyper-parameters of these updates.
    """

    contributed: int
    base: int
    is_computing: bool
    has_ended: bool
    applied: int
    options: int


class Decision(Enum):
    """The next act of all ranks."""

    WAIT = 0
    UPDATE = 1
    END = 2


class Clock(ABC):
    """Counts updates, and decides when the next update is made. It is equal on all ranks."""

    def __init__(self, staleness: int, updates: int = 0) -> None:
        self.staleness, self.updates = staleness, updates

    @abstractmethod
    def decide(self, reports: Sequence[ClockReport]) -> Decision:
        """Returns the next act, given the report of each rank."""

    @abstractmethod
    def waits_for(self, reports: Sequence[ClockReport]) -> list[int]:
        """Returns the ranks that have yet to contribute a gradient to the next update."""


class GlobalBatchClock(Clock):
    """A clock with updates of at least as many gradients as there are ranks.

    It does not matter which ranks computed them, so a slow rank contributes fewer gradients and stops no
    rank. A gradient that was computed with `base` updates becomes part of update number `base + staleness` at
    the latest, counted from 0.
    """

    _included = 0  # gradients in updates

    def decide(self, reports: Sequence[ClockReport]) -> Decision:
        waiting = sum(report.contributed for report in reports) - self._included
        active = [report for report in reports if not report.has_ended]
        if not active and not waiting:
            return (
                Decision.END if all(report.applied == self.updates for report in reports) else Decision.WAIT
            )
        is_enough = waiting >= len(active)
        return Decision.UPDATE if is_enough and not self._held_by(reports) else Decision.WAIT

    def waits_for(self, reports: Sequence[ClockReport]) -> list[int]:
        computing = [
            rank for rank, report in enumerate(reports) if report.is_computing and not report.has_ended
        ]
        return self._held_by(reports) or computing

    def count(self, gradients: int) -> None:
        """Counts an update of this number of gradients."""
        self.updates += 1
        self._included += gradients

    def _held_by(self, reports: Sequence[ClockReport]) -> list[int]:
        """Returns the ranks with a gradient that would be too old if an update were made without it."""
        oldest = self.updates + 1 - self.staleness
        return [rank for rank, report in enumerate(reports) if not report.has_ended and report.base < oldest]


class WorkerClock(Clock):
    """A clock with updates of 1 gradient from each rank that has not ended: its next gradient."""

    def decide(self, reports: Sequence[ClockReport]) -> Decision:
        if self.waits_for(reports):
            return Decision.WAIT
        is_any = any(report.contributed > self.updates for report in reports)
        return Decision.UPDATE if is_any else Decision.END

    def waits_for(self, reports: Sequence[ClockReport]) -> list[int]:
        missing = [not report.has_ended and report.contributed <= self.updates for report in reports]
        return [rank for rank, is_missing in enumerate(missing) if is_missing]
