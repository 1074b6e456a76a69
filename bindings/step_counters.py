"""Counters of the training steps that the optimizers of an adapter complete."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_USUAL_STEPS = 15  # whose median is the usual duration
_RECENT_WAITS = 64  # that are remembered with their times
_LONG = 2.0  # times the usual duration: a longer step contains something else


class Stepper(NamedTuple):
    """An optimizer over all ranks whose steps have a border in Python, at which settings may change.

    Attributes:
        name: tells the optimizers of a process apart.
        hands_over: whether the setting hand_over concerns it.
        operations: the number of those that it submits in each step; 0: unknown.
        bytes: of these, where gradients are not compressed; those absent on all ranks included.
        parts: in which gradients are submitted at most, when they are handed over early; 0: unknown.
    """

    name: str
    hands_over: bool = False
    operations: int = 0
    bytes: int = 0
    parts: int = 0


class ExposedTime:
    """The time in which a program waits for the exchange of its step: `with` it, the program waits."""

    def __init__(self) -> None:
        # The time of the waits that have ended, the number of those inside each other, the beginning of the
        # outermost. Another thread reads them, so they are replaced together.
        self._state = (0.0, 0, 0.0)
        self._has_waited = False
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_WAITS)

    @property
    def recent(self) -> list[tuple[float, float]]:
        """Returns begin and end of the last waits, by `time.perf_counter`, the oldest first."""
        recent = list(self._recent.copy())  # at once: the program goes on
        _, depth, begin = self._state
        return [*recent, (begin, time.perf_counter())] if depth else recent

    @property
    def seconds(self) -> float | None:
        """Returns the time until now; None if the program has never waited."""
        ended, depth, begin = self._state
        present = time.perf_counter() - begin if depth else 0.0
        return ended + present if self._has_waited else None

    def __enter__(self) -> None:
        ended, depth, begin = self._state
        self._has_waited = True
        self._state = (ended, depth + 1, begin if depth else time.perf_counter())

    def __exit__(self, *error: object) -> None:
        ended, depth, begin = self._state
        if depth == 1:
            end = time.perf_counter()
            self._recent.append((begin, end))
            ended += end - begin
        self._state = (ended, depth - 1, begin)


class StepCounters:
    """The counters of one rank in one world: `sirtaki.bindings.observe.Steps` documents them.

    A step lasts from the end of the one before it to its own end. The first one has no beginning, and is
    counted, not timed.

    Attributes:
        exposed: measures the waits of the program.
        may_be_late: whether an optimizer steps without ranks that are late.
        listener: is called with the optimizer at the end of each step that has one; None: nobody listens.
        count: the number of steps.
        counts: the number of timed steps in each range of BOUNDS, and above the last.
        total_seconds, last_seconds: the duration of all timed steps, and of the last one.
        productive_seconds: the same total, in which a long step counts as the median of those before it.
    """

    def __init__(self) -> None:
        self.exposed = ExposedTime()
        self.may_be_late = False
        self.listener: Callable[[Stepper], None] | None = None
        self.count = 0
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total_seconds = self.last_seconds = self.productive_seconds = 0.0
        self._usual: deque[float] = deque(maxlen=_USUAL_STEPS)
        self._end: float | None = None
        self._committed_count, self._committed_seconds = 0, 0.0

    @property
    def uncommitted(self) -> int:
        """Returns the number of steps since the last commit."""
        return self.count - self._committed_count

    @property
    def age_seconds(self) -> float:
        """Returns the time since the last step; 0 before the first one."""
        return time.perf_counter() - self._end if self._end is not None else 0.0

    def end(self, number: int = 1, by: Stepper | None = None) -> None:
        """Counts a step, or as many equal ones, that have just ended.

        Args:
            number: the number of steps.
            by: the optimizer; None if its steps are those of a compiled program, or not of all ranks.
        """
        if by is not None and self.listener is not None:
            self.listener(by)
        before, self._end = self._end, time.perf_counter()
        self.count += number
        if before is None:
            return
        seconds = (self._end - before) / number
        usual = median(self._usual) if self._usual else seconds
        self.counts[bisect_left(BOUNDS, seconds)] += number
        self.total_seconds += number * seconds
        self.last_seconds = seconds
        self.productive_seconds += number * (usual if seconds > _LONG * usual else seconds)
        self._usual.append(seconds)

    def commit(self) -> tuple[int, float]:
        """Returns the number of the steps, and the productive seconds, since the last commit."""
        count, seconds = self.uncommitted, self.productive_seconds - self._committed_seconds
        self._committed_count, self._committed_seconds = self.count, self.productive_seconds
        return count, seconds
