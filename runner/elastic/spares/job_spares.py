"""The spares of an elastic job, on all of its hosts: carries out what their pool decides."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sirtaki.runner.elastic.arbiter.model import doubled
from sirtaki.runner.elastic.spares.host_spares import HostSpares, SpareProcess
from sirtaki.runner.hosts.remote import RemoteHost
from sirtaki.runner.launch.hosts import is_own_host
from sirtaki.runner.launch.process import RankProcess

_FIRST_LANE = -2  # of spares, downwards: slots have the lanes from 0 on, and -1 is none


class SpareDisplay(Protocol):
    """The part of the display that spares need."""

    def say(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...

    def add_spare(self, lane: int, label: str) -> None:
        """Prepares for the output of a spare."""

    def read_rank(self, rank: int, stdout: int, stderr: int) -> None:
        """Shows the data from these descriptors as the output of a lane."""

    def move_spare(self, spare: int, rank: int) -> None:
        """Shows the output of a spare, in its lane so far, as that of a slot from now on."""


class SpareHost(Protocol):
    """A host that can have spares."""

    def start(self, lane: int) -> None: ...

    def dismiss(self, lane: int) -> None: ...


@dataclass(frozen=True)
class RemoteSpares:
    """Another host's spares, held by its agent; `values` returns the SPARE frame's values for a host."""

    host: RemoteHost
    values: Callable[[str], Mapping[str, Any]]

    def start(self, lane: int) -> None:
        self.host.start_spare(lane, self.values(self.host.name))

    def dismiss(self, lane: int) -> None:
        self.host.dismiss_spare(lane)


class JobSpares:
    """All spares of a job; the main loop calls its methods, and hosts call the `SpareNews` methods."""

    def __init__(
        self,
        wanted: int,
        start: Callable[[], SpareProcess],
        elsewhere: Callable[[str], SpareHost | None],
        folder: Path,
        selector: selectors.BaseSelector,
        display: SpareDisplay,
    ) -> None:
        """Starts nothing yet.

        Args:
            wanted: the number of spares in the whole job.
            start: starts a process on this host. Raises OSError and LaunchError.
            elsewhere: returns another host; None if it is not there.
            folder: the job's folder on this host.
            selector: the one of the main loop.
            display: shows the spares' output, and lines about them.
        """
        self.wanted = wanted
        self._pool = SparePool(wanted)
        self._here = HostSpares(start, self._read_output, folder, selector, self)
        self._elsewhere = elsewhere
        self._display = display
        self._hosts: dict[int, str] = {}  # of all spares that were not dismissed, by their lanes
        self._is_over = False

    @property
    def due(self) -> float | None:
        """Returns when to call `advance` (time.monotonic()); None if nothing is due."""
        if self._is_over:
            return None
        return min((due for due in (self._pool.due, self._here.due) if due is not None), default=None)

    def advance(self, hosts: Mapping[str, int], is_running: bool, now: float) -> None:
        """Starts missing spares, and ends superfluous spares.

        `hosts`: those on which workers can be started, each with the number of those that run there.
        """
        if self._is_over or not self.wanted:
            return
        started, ended = self._pool.advance(hosts, is_running, now)
        for spare in ended:
            self._dismiss(_FIRST_LANE - spare.number)
        for spare in started:
            lane = _FIRST_LANE - spare.number
            self._hosts[lane] = spare.host
            self._display.add_spare(lane, "spare" if is_own_host(spare.host) else f"{spare.host}:spare")
            if (host := self._at(spare.host)) is not None:
                host.start(lane)
        self._here.advance(now)

    def __contains__(self, host: object) -> bool:
        """Returns whether a spare waits that can take a place on this host at once."""
        return isinstance(host, str) and self._pool.has_ready(host) and self._at(host) is not None

    def take(self, host: str, lane: int, environment: Mapping[str, str], now: float) -> RankProcess | None:
        """Makes a spare of this host a worker with this environment; its output becomes that of `lane`.

        Returns None if there is none.
        """
        while (spare := self.choose(host, now)) is not None:
            if (process := self._here.take(spare, lane, environment)) is not None:
                self._display.move_spare(spare, lane)
                return process
        return None

    def choose(self, host: str, now: float) -> int | None:
        """Returns the lane of the spare that takes a place on another host, by order of its agent.

        Returns None if there is none. It may have ended, or end before the order comes.
        """
        number = self._pool.take(host, now)
        return None if number is None else _FIRST_LANE - number

    def check(self) -> None:
        """Reports the spares of this host that have ended."""
        self._here.check()

    def end(self) -> None:
        """Dismisses all spares: the job ends."""
        self._is_over = True
        _, ended = self._pool.advance({}, False, time.monotonic())
        for spare in ended:
            self._dismiss(_FIRST_LANE - spare.number)

    def reap(self) -> None:
        """Waits for the spares of this host, and kills spares that do not exit in time."""
        self.end()
        self._here.reap()

    # ---- News of the hosts -----------------------------------------------------------------------------

    def started(self, lane: int, pid: int) -> None:
        self._display.detail(f"spare {_FIRST_LANE - lane} is pid {pid}{self._where(lane)}")

    def waits(self, lane: int, modules: int, seconds: float) -> None:
        number = _FIRST_LANE - lane
        self._pool.note_ready(number, time.monotonic())
        text = f"spare {number} waits{self._where(lane)}, with {modules} modules after {seconds:.1f} s"
        self._display.detail(text)

    def ended(self, lane: int, why: str) -> None:
        host = self._hosts.pop(lane, None)
        if host is not None:  # it was not told to end
            text = self._pool.note_end(_FIRST_LANE - lane, why, time.monotonic())
            self._display.say(text or f"a spare on {host} {why} just before it took a place")

    def _dismiss(self, lane: int) -> None:
        if (host := self._at(self._hosts.pop(lane))) is not None:
            host.dismiss(lane)

    def _at(self, host: str) -> SpareHost | None:
        return self._here if is_own_host(host) else self._elsewhere(host)

    def _where(self, lane: int) -> str:
        host = self._hosts.get(lane, "")
        return f" on {host}" if host and not is_own_host(host) else ""

    def _read_output(self, process: SpareProcess) -> None:
        self._display.read_rank(process.rank, process.stdout, process.stderr)


# ---- The pool of spares, without I/O: how many wait on which host, and which spare takes a place -------
# It is a state machine without I/O, like the arbiter, which knows nothing of it: a spare that takes a
# place becomes the process that the arbiter has ordered to start.


REPLENISH_SECONDS = 1.0  # after one has taken a place: the ranks recover on the same cores
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a host's next spare, after one has failed
_MOST_FAILURES = 10  # of a host's spares, in a row
_STABLE_SECONDS = 60.0  # a spare that fails after it has waited for so long does not count as "in a row"


@dataclass
class Spare:
    """A process that has no place in the job yet; `ready` is when it began to wait, None while it imports."""

    number: int
    host: str
    ready: float | None = None


@dataclass
class _HostFailures:
    """The consecutive failures of a host's spares, and when the next spare may start."""

    count: int = 0
    until: float = 0.0

    def note(self, now: float) -> float:
        """Counts a failure; returns the pause in seconds."""
        self.count += 1
        pause = doubled(_SHORTEST_PAUSE, _LONGEST_PAUSE, self.count - 1)
        self.until = now + pause
        return pause


@dataclass
class SparePool:
    """The spares. `wanted` is their number in the whole job; hosts are named as in slots.

    They are spread over the hosts on which ranks run: no host keeps two more than another one can have.
    """

    wanted: int
    _spares: dict[int, Spare] = field(default_factory=dict)
    _hosts: Mapping[str, int] = field(default_factory=dict)
    _failures: dict[str, _HostFailures] = field(default_factory=dict)
    _next_number: int = 0
    _not_before: float = 0.0
    _is_running: bool = False

    def advance(
        self, hosts: Mapping[str, int], is_running: bool, now: float
    ) -> tuple[list[Spare], list[Spare]]:
        """Returns the spares to start, and the spares to end: of hosts that left or hold too many.

        Args:
            hosts: the hosts on which ranks may be started, with the number that run there. A host without any
                keeps its spares, and gets no more.
            is_running: whether the ranks train; spares start at no other time.
            now: time.monotonic().
        """
        self._hosts, self._is_running = dict(hosts), is_running
        ended = [spare for spare in self._spares.values() if spare.host not in self._hosts]
        for spare in ended:
            del self._spares[spare.number]
        started: list[Spare] = []
        if not is_running or now < self._not_before:
            return started, ended
        while (host := self._next_host(now)) is not None:
            if len(self._spares) >= self.wanted:
                if (surplus := self._surplus(host)) is None:
                    break
                ended.append(self._spares.pop(surplus.number))
            spare = Spare(self._next_number, host)
            self._next_number += 1
            self._spares[spare.number] = spare
            started.append(spare)
        return started, ended

    @property
    def due(self) -> float | None:
        """Returns when `advance` may start a spare (time.monotonic()); None if that takes an event."""
        if not self._is_running:
            return None
        hosts = self._usable_hosts()
        if len(self._spares) >= self.wanted:
            hosts = [host for host in hosts if self._surplus(host) is not None]
        moments = [self._failures_of(host).until for host in hosts]
        return max(min(moments), self._not_before) if moments else None

    def note_ready(self, number: int, now: float) -> None:
        """Records that a spare has imported its modules, and waits."""
        if number in self._spares:
            self._spares[number].ready = now

    def has_ready(self, host: str) -> bool:
        """Returns whether a spare of this host waits, so that a new worker starts at once."""
        return any(spare.ready is not None for spare in self._on(host))

    def take(self, host: str, now: float) -> int | None:
        """Returns the number of the spare that takes a place on this host; None if there is none.

        The oldest of those that wait is taken; else one that still imports, which is ahead of a new process.
        """
        own = self._on(host)
        if not own:
            return None
        spare = min(own, key=lambda waiting: (waiting.ready is None, waiting.number))
        del self._spares[spare.number]
        self._failures.pop(host, None)
        self._not_before = now + REPLENISH_SECONDS
        return spare.number

    def note_end(self, number: int, why: str, now: float) -> str:
        """Records the end of a waiting spare; returns the line for the user, "" if it was dismissed."""
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
        """Returns the free host with the fewest spares, then the most ranks; None if no host is free."""
        free = [host for host in self._usable_hosts() if self._failures_of(host).until <= now]
        return min(free, key=lambda host: (len(self._on(host)), -self._hosts[host]), default=None)

    def _surplus(self, host: str) -> Spare | None:
        """Returns a spare to end so that a spare may start on `host`; None if there is none.

        The spare is on a host with at least 2 spares more; a spare that still imports is preferred, then the
        newest.
        """
        fullest = max(map(self._on, self._hosts), key=len, default=[])
        if len(fullest) < len(self._on(host)) + 2:
            return None
        return max(fullest, key=lambda waiting: (waiting.ready is None, waiting.number))

    def _on(self, host: str) -> list[Spare]:
        return [spare for spare in self._spares.values() if spare.host == host]

    def _usable_hosts(self) -> list[str]:
        """Returns the hosts that may have another spare, now or after a pause."""
        used = [host for host, ranks in self._hosts.items() if ranks]
        return [host for host in used if self._failures_of(host).count < _MOST_FAILURES]

    def _failures_of(self, host: str) -> _HostFailures:
        return self._failures.setdefault(host, _HostFailures())
