"""The spares of an elastic job: how many wait on which host, which to start, and which one takes a place.

It is a state machine without I/O, like the arbiter, which knows nothing of it: a spare that takes a place
becomes the process that the arbiter has ordered to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sirtaki.runner.elastic.pauses import doubled

REPLENISH_SECONDS = 1.0  # after one has taken a place: the ranks recover on the same cores
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a host's next spare, after one has failed
_MOST_FAILURES = 10  # of a host's spares, in a row
_STABLE_SECONDS = 60.0  # a spare that fails after it has waited for so long does not count as "in a row"


@dataclass
class Spare:
    """A spare: a process that has no place in the job yet. `ready` is the moment since which it waits."""

    number: int
    host: str
    ready: float | None = None


@dataclass
class _HostFailures:
    """The failures of a host's spares in a row, and when the next one may start."""

    count: int = 0
    until: float = 0.0

    def note(self, now: float) -> float:
        """Notes one more; returns the pause in seconds."""
        self.count += 1
        pause = doubled(_SHORTEST_PAUSE, _LONGEST_PAUSE, self.count - 1)
        self.until = now + pause
        return pause


@dataclass
class SparePool:
    """The spares. `wanted` is their number in the whole job; hosts are named as in slots."""

    wanted: int
    _spares: dict[int, Spare] = field(default_factory=dict)
    _hosts: Sequence[str] = ()
    _failures: dict[str, _HostFailures] = field(default_factory=dict)
    _next_number: int = 0
    _not_before: float = 0.0
    _is_running: bool = False

    def advance(self, hosts: Sequence[str], is_running: bool, now: float) -> tuple[list[Spare], list[Spare]]:
        """Returns the spares to start, and those to end because their host does not belong to the job.

        Args:
            hosts: the hosts of the job that can have spares: those where a rank has written its modules.
            is_running: whether the ranks train; spares start at no other time.
            now: time.monotonic().
        """
        self._hosts, self._is_running = list(dict.fromkeys(hosts)), is_running
        gone = [one for one in self._spares.values() if one.host not in self._hosts]
        for spare in gone:
            del self._spares[spare.number]
        started: list[Spare] = []
        if is_running and now >= self._not_before:
            while len(self._spares) < self.wanted and (host := self._next_host(now)) is not None:
                spare = Spare(self._next_number, host)
                self._next_number += 1
                self._spares[spare.number] = spare
                started.append(spare)
        return started, gone

    @property
    def due(self) -> float | None:
        """Returns when `advance` may start a spare (time.monotonic()); None if that takes an event."""
        if not self._is_running or len(self._spares) >= self.wanted:
            return None
        moments = [self._failures_of(host).until for host in self._usable_hosts()]
        return max(min(moments), self._not_before) if moments else None

    def note_ready(self, number: int, now: float) -> None:
        """Notes that a spare has imported its modules, and waits."""
        if number in self._spares:
            self._spares[number].ready = now

    def has_ready(self, host: str) -> bool:
        """Returns whether a spare of this host waits, so that a new worker starts at once."""
        return any(one.host == host and one.ready is not None for one in self._spares.values())

    def take(self, host: str, now: float) -> int | None:
        """Returns the number of the spare that takes a place on this host; None if there is none.

        The oldest of those that wait is taken; else one that still imports, which is ahead of a new process.
        """
        own = [one for one in self._spares.values() if one.host == host]
        if not own:
            return None
        spare = min(own, key=lambda one: (one.ready is None, one.number))
        del self._spares[spare.number]
        self._failures.pop(host, None)
        self._not_before = now + REPLENISH_SECONDS
        return spare.number

    def note_end(self, number: int, why: str, now: float) -> str:
        """Takes the end of a spare that has no place; returns the line for the user, "" if it was ended."""
        spare = self._spares.pop(number, None)
        if spare is None:
            return ""
        failures = self._failures_of(spare.host)
        if spare.ready is not None and now - spare.ready >= _STABLE_SECONDS:
            failures.count = 0
        pause = failures.note(now)
        if failures.count >= _MOST_FAILURES:
            return f"a spare on {spare.host} {why}: the last one there, because {failures.count} have failed"
        return f"a spare on {spare.host} {why}; another one starts in {pause:g} s"

    def _next_host(self, now: float) -> str | None:
        """Returns the host with the fewest spares; the first of several."""
        free = [host for host in self._usable_hosts() if self._failures_of(host).until <= now]
        counts = {host: sum(one.host == host for one in self._spares.values()) for host in free}
        return min(free, key=lambda host: counts[host], default=None)

    def _usable_hosts(self) -> list[str]:
        return [host for host in self._hosts if self._failures_of(host).count < _MOST_FAILURES]

    def _failures_of(self, host: str) -> _HostFailures:
        return self._failures.setdefault(host, _HostFailures())
