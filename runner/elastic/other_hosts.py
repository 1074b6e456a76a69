"""The hosts of an elastic job other than hvdrun's own: reached when they are named, and again when lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sirtaki.runner.elastic.arbiter.model import Slot, doubled
from sirtaki.runner.hosts.host_connection import ANSWER_SECONDS
from sirtaki.runner.hosts.remote import RemoteHost
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import is_own_host

_STABLE_SECONDS = 60.0  # a host that was usable for that long begins anew with the shortest pause


@dataclass
class _Host:
    """A host.

    Attributes:
        slots: the number that was named; 0 if it is not named any more.
        remote: its connection; None between two attempts.
        is_prepared: whether its agent was told to begin the job.
        is_ready: whether that has begun it, so that workers can be started there.
        due: when to give the attempt up, or to begin the next one (time.monotonic()).
        ready_since: when it became ready.
        leaves: whether its agent was asked to end.
        is_released: whether its agent was told to end, because no worker runs there any more.
        failures: attempts and losses in a row.
        complaint: the last failure that was shown.
    """

    name: str
    slots: int = 0
    remote: RemoteHost | None = None
    is_prepared: bool = False
    is_ready: bool = False
    due: float = 0.0
    ready_since: float = 0.0
    leaves: bool = False
    is_released: bool = False
    failures: int = 0
    complaint: str = ""

    @property
    def takes_orders(self) -> bool:
        """Returns whether workers and spares can be started there by its agent, which has not to end yet."""
        return self.is_ready and not self.is_released


@dataclass
class OtherHosts:
    """The hosts.

    Attributes:
        begin: queries a host; returns at once. Raises LaunchError.
        start: prepares a host that has answered for this number of workers. Raises LaunchError.
        say: shows a line.
        cooldown: the shortest and the longest pause between two attempts, in seconds.
    """

    begin: Callable[[str], RemoteHost]
    start: Callable[[RemoteHost, int], None]
    say: Callable[[str], None]
    cooldown: tuple[float, float]
    _hosts: dict[str, _Host] = field(default_factory=dict)

    def adopt(self, remotes: Sequence[RemoteHost], slots: Sequence[Slot]) -> None:
        """Adds hosts that have answered already. Raises LaunchError."""
        self.want(slots)
        for remote in remotes:
            host = self._hosts[remote.name]
            host.remote = remote
            self._use(host, remote, time.monotonic())

    def want(self, slots: Sequence[Slot]) -> None:
        """Sets the slots of the job: hosts that are new are reached with the next `poll`."""
        counts: dict[str, int] = {}
        for slot in slots:
            if not is_own_host(slot.host):
                counts[slot.host] = counts.get(slot.host, 0) + 1
        for host in self._hosts.values():
            host.slots = counts.pop(host.name, 0)
        self._hosts |= {name: _Host(name, count) for name, count in counts.items()}

    def usable(self, slots: Sequence[Slot], used: Mapping[int, Slot]) -> list[Slot]:
        """Returns the slots in which workers can be started, and slots in which workers may still run."""
        taken = [slot for slot in used.values() if not self._leaves(slot)]
        return [slot for slot in slots if slot in taken or self.takes_workers(slot)]

    def takes_workers(self, slot: Slot) -> bool:
        """Returns whether a worker can be started in a slot, if it is free."""
        return is_own_host(slot.host) or (self._hosts[slot.host].takes_orders and not self._leaves(slot))

    def ready(self, name: str) -> RemoteHost | None:
        """Returns the connection to a host on which workers can be started; None if it is not ready."""
        host = self._hosts.get(name)
        return host.remote if host is not None and host.takes_orders else None

    def poll(self, now: float, used: Mapping[int, Slot]) -> bool:
        """Continues with all hosts; returns whether the set of usable hosts has changed.

        `used` are the slots in which workers run.
        """
        in_use = {slot.host for slot in used.values()}
        changes = [self._go_on(host, now) for host in self._hosts.values()]
        for host in self._hosts.values():
            is_wanted = host.slots and not host.leaves
            if host.remote is not None and host.is_ready and not is_wanted and host.name not in in_use:
                self._release(host, host.remote)
        return any(changes)

    @property
    def due(self) -> float | None:
        """Returns when to call `poll` (time.monotonic()), beside the deadlines of `remotes`."""
        due = (host.due for host in self._hosts.values() if host.slots and not host.is_ready)
        return min(due, default=None)

    def finish(self) -> None:
        """Orders the agents to send the last output and to end: all workers have ended."""
        for host in self._hosts.values():
            if host.remote is not None and host.is_ready:
                self._release(host, host.remote)
            elif host.remote is not None:
                host.remote.give_up("the job has ended")

    def _leaves(self, slot: Slot) -> bool:
        return not is_own_host(slot.host) and self._hosts[slot.host].leaves

    def _go_on(self, host: _Host, now: float) -> bool:
        """Returns whether the host has become usable, or ceased to be so."""
        if host.remote is None:
            if host.slots and host.due <= now:
                self._begin(host, now)
            return False
        host.remote.poll()
        if host.remote.ended or (host.remote.failure and not host.is_ready):
            return self._lose(host, host.remote, now)
        if not host.is_prepared and host.remote.answer is not None and host.slots:
            try:
                self._use(host, host.remote, now)
            except LaunchError as error:
                host.remote.give_up(str(error))
        if not host.is_ready and host.remote.accepted:
            host.is_ready, host.ready_since, host.complaint = True, now, ""
            return True
        if not host.is_ready and host.due <= now:
            host.remote.give_up_waiting(ANSWER_SECONDS)
        if not host.is_prepared and not host.slots:  # it is not named any more
            host.remote.give_up("it is not needed")
        has_news, host.leaves = host.remote.leaves and not host.leaves, host.remote.leaves
        if has_news:
            self.say(f"{host.name} was asked to end: its ranks leave at the next commit")
        return has_news

    def _begin(self, host: _Host, now: float) -> None:
        host.due = now + ANSWER_SECONDS
        try:
            host.remote = self.begin(host.name)
            if host.complaint:
                host.remote.mute()
        except LaunchError as error:
            self._pause(host, str(error), now)

    def _use(self, host: _Host, remote: RemoteHost, now: float) -> None:
        self.start(remote, host.slots)
        host.is_prepared, host.due = True, now + ANSWER_SECONDS

    def _release(self, host: _Host, remote: RemoteHost) -> None:
        """Allows the agent of a host to end: the host was asked to end, or is no longer named.

        It takes no further orders: if the host is named again, another agent begins the job.
        """
        if not host.is_released:
            host.is_released = True
            remote.finish()

    def _lose(self, host: _Host, remote: RemoteHost, now: float) -> bool:
        was_ready, was_prepared, was_released = host.is_ready, host.is_prepared, host.is_released
        host.remote = None
        host.is_prepared = host.is_ready = host.leaves = host.is_released = False
        remote.close()
        failure = f"{host.name} was lost: {remote.failure}" if was_prepared else remote.failure
        if was_ready and now >= host.ready_since + _STABLE_SECONDS:
            host.failures = 0
        if remote.leaves:
            host.due = now + self.cooldown[1]
        elif host.slots and not was_released:
            self._pause(host, failure, now)
        else:
            host.due = now  # if it is named, or once it is named again
        return was_ready

    def _pause(self, host: _Host, failure: str, now: float) -> None:
        host.failures += 1
        pause = doubled(*self.cooldown, times=host.failures - 1)
        host.due = now + pause
        if failure != host.complaint:
            host.complaint = failure
            self.say(f"{failure}; the next attempt to use it is in {pause:g} s")

    def remotes(self) -> list[RemoteHost]:
        """Returns the connections that there are."""
        return [host.remote for host in self._hosts.values() if host.remote is not None]
