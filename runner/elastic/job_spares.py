"""The spares of an elastic job, on all of its hosts: carries out what their pool decides."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sirtaki.runner.elastic.host_spares import HostSpares
from sirtaki.runner.elastic.spare_process import SpareProcess
from sirtaki.runner.elastic.spares import SparePool
from sirtaki.runner.hosts import is_own_host
from sirtaki.runner.process import RankProcess
from sirtaki.runner.remote import RemoteHost

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
    """Another host's spares, which its agent holds. `values` returns those of the SPARE frame for a host."""

    host: RemoteHost
    values: Callable[[str], Mapping[str, Any]]

    def start(self, lane: int) -> None:
        self.host.start_spare(lane, self.values(self.host.name))

    def dismiss(self, lane: int) -> None:
        self.host.dismiss_spare(lane)


class JobSpares:
    """The spares. Its methods are called by the job's main loop; those of `SpareNews` by its hosts, too."""

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
        """Starts the spares that are missing, and ends those that are not needed.

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
        """Makes a spare of this host a worker, with this environment, whose output is that of this lane.

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
        """Notes the spares of this host that have ended."""
        self._here.check()

    def end(self) -> None:
        """Tells all spares that they are not needed: the job ends."""
        self._is_over = True
        _, ended = self._pool.advance({}, False, time.monotonic())
        for spare in ended:
            self._dismiss(_FIRST_LANE - spare.number)

    def reap(self) -> None:
        """Waits for the spares of this host, and kills those that do not leave."""
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
