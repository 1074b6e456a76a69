"""The lease of the ranks on another host: they run as long as hvdrun and their agent hear of each other.

The agent asks for it to be renewed, and ends its ranks when that has not happened for a while. Without a word
from a host, hvdrun can therefore be certain that no rank of it runs any more. Each side counts from a moment
that is at or before the other's: the agent from its question, hvdrun from its answer to that question.
(C. Gray and D. Cheriton, "Leases", SOSP 1989.)
"""

from __future__ import annotations

import math
import time
from collections import deque

RENEWALS = 5  # questions in the time of a lease
_MARGIN = 0.1  # seconds: for an agent to notice that its lease has ended


def lease_clock() -> float:
    """Returns the time in seconds, which goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class AgentLease:
    """The agent's side. `seconds` is the length; 0 for a lease that never ends."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds or math.inf
        self._questions: deque[tuple[int, float]] = deque()  # without an answer: number and time
        self._count = 0
        self._end = now + self._seconds
        self._is_suspended = False

    def begin(self, seconds: float, now: float) -> None:
        """Starts a lease of `seconds`; answers to earlier questions do not renew it."""
        self._seconds = seconds or math.inf
        self._questions.clear()
        self._end = now + self._seconds

    @property
    def end(self) -> float:
        """Returns its end, a time of `lease_clock`; infinite while the clock is stopped."""
        return math.inf if self._is_suspended else self._end

    @property
    def interval(self) -> float:
        """Returns the seconds between two questions."""
        return self._seconds / RENEWALS

    def seconds_left(self, now: float) -> float:
        """Returns the seconds until its end; infinite while the clock is stopped."""
        return math.inf if self._is_suspended else max(self._end - now, 0.0)

    def ask(self, now: float) -> int:
        """Returns the number of a new question."""
        self._count = (self._count + 1) % (1 << 32)
        if self._seconds < math.inf:
            self._questions.append((self._count, now))
        return self._count

    def renew(self, number: int) -> None:
        """Extends the lease by hvdrun's answer to question `number`; ignores unknown numbers."""
        while any(asked == number for asked, _ in self._questions):
            _, moment = self._questions.popleft()
            self._end = max(self._end, moment + self._seconds)

    def suspend(self) -> None:
        """Stops the clock: hvdrun and the ranks are stopped (Ctrl-Z)."""
        self._is_suspended = True

    def resume(self, now: float) -> None:
        """Starts a new lease if the clock was stopped."""
        if self._is_suspended:
            self._is_suspended, self._end = False, now + self._seconds

    def is_over(self, now: float) -> bool:
        return not self._is_suspended and now >= self._end


class HostLease:
    """hvdrun's side."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds or math.inf
        self.end = now + self._seconds + _MARGIN

    def grant(self, now: float) -> None:
        """Records an answer to the agent; the agent's lease ends no later than `end`."""
        self.end = max(self.end, now + self._seconds + _MARGIN)

    def resume(self, now: float) -> None:
        """Starts a new lease after a stop.

        The agent resumes on a message of its own, usually within a lease.
        """
        self.end = now + 2 * self._seconds + _MARGIN

    def is_over(self, now: float) -> bool:
        return now >= self.end
