"""The order in which a job's hosts are reached: so many at a time, in large jobs over each other's agents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from sirtaki.runner.hosts.remote import RemoteHost
from sirtaki.runner.hosts.ssh import CONNECT_SECONDS

ANSWER_SECONDS = CONNECT_SECONDS + 50.0  # for the login, and for Python to start
AT_A_TIME = (
    64  # hosts that this machine logs in to at the same time; those of a large job that it holds itself
)

Begin = Callable[[str, "RemoteHost | None"], RemoteHost]


class HostAttempts:
    """The attempts to reach hosts; `begin` starts an attempt, directly or through a host that has answered.

    With `relays`, hvdrun reaches only the first AT_A_TIME hosts of a larger job directly, and every other
    host through such a host, or directly if that fails.
    """

    def __init__(self, names: Sequence[str], begin: Begin, relays: bool) -> None:
        self._names = names
        self._begin = begin
        count = min(len(names), AT_A_TIME) if relays else len(names)
        self._from_here = deque(range(count))
        self._children: dict[int, list[int]] = {}  # by the host over which they are to be reached
        for index in range(count, len(names)):
            self._children.setdefault(index % count, []).append(index)
        self._remotes: dict[int, RemoteHost] = {}
        self._deadlines: dict[int, float] = {}  # of the attempts that go on
        self._over: dict[int, int] = {}  # hosts that are reached over another one, which is the value
        self.failed_relays: list[str] = []  # reasons why hosts were not reached over others

    def advance(self, now: float) -> list[int]:
        """Continues all attempts; returns the hosts that have answered by now, or have failed."""
        for relay in set(self._over.values()):  # its end is the end of those behind it
            self._remotes[relay].poll()
        settled = []
        for index in list(self._deadlines):
            remote = self._remotes[index]
            if remote.answer is None and self._deadlines[index] <= now:
                remote.give_up_waiting(ANSWER_SECONDS)
            remote.poll()
            if remote.answer is None and not remote.failure:
                continue
            del self._deadlines[index]
            if remote.answer is None and self._over.pop(index, None) is not None:
                self.failed_relays.append(remote.failure)
                remote.close()
                self._from_here.append(index)
                continue
            self._go_on_from(index, now)
            settled.append(index)
        while self._from_here and self._count_from_here() < AT_A_TIME:
            self._start(self._from_here.popleft(), None, now)
        return settled

    @property
    def due(self) -> float | None:
        """Returns when to call `advance`, whatever happens (time.monotonic()); None if all is known."""
        return min(self._deadlines.values(), default=None)

    def remotes(self) -> list[RemoteHost]:
        """Returns the connections to all hosts, in the order of their names."""
        return [self._remotes[index] for index in range(len(self._names))]

    def _go_on_from(self, index: int, now: float) -> None:
        """Continues with the hosts for which this host is the relay; directly if it failed."""
        remote = self._remotes[index]
        for child in self._children.pop(index, []):
            if remote.failure:
                self._from_here.append(child)
            else:
                self._over[child] = index
                self._start(child, remote, now)

    def _start(self, index: int, over: RemoteHost | None, now: float) -> None:
        self._remotes[index] = self._begin(self._names[index], over)
        self._deadlines[index] = now + ANSWER_SECONDS

    def _count_from_here(self) -> int:
        return sum(index not in self._over for index in self._deadlines)
