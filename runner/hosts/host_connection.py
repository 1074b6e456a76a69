"""Connects to the hosts of a job, and reports why a host cannot take part."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors
from sirtaki.runner.hosts.agent_launcher import AgentLauncher
from sirtaki.runner.hosts.remote import RemoteHost
from sirtaki.runner.hosts.ssh import CONNECT_SECONDS
from sirtaki.runner.launch.capacity import count_gpus
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import Host, is_own_host
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.supervise.display import Display, Progress
from sirtaki.runner.supervise.signals import WakeupPipe, stop_this_process

_PER_HOST = 6  # descriptors: both ends of three pipes, of a host behind another one
_SHOW_SECONDS = 2.0  # time to show the output of ssh or srun before hvdrun ends


@dataclass(frozen=True)
class Connection:
    """The connections to a job's hosts, before any rank has been started."""

    launcher: AgentLauncher
    program: str  # that ranks run
    selector: selectors.BaseSelector
    display: Display
    wakeup: WakeupPipe
    reaper: Reaper
    question: Mapping[str, Any]  # to the agents, besides folder and program

    def connect(self, hosts: Sequence[Host], relays: bool = False) -> tuple[list[RemoteHost], list[Host]]:
        """Queries all hosts except this host, until all have answered. Raises LaunchError.

        `relays`: the hosts of a large job may be reached over each other, so that they are lost together.
        Returns the connections, and the hosts with their numbers of slots.
        """
        names = [host.name for host in hosts if not is_own_host(host.name)]
        remotes: list[RemoteHost] = []
        if names:
            allow_descriptors(_PER_HOST * len(names))
            attempts = HostAttempts(names, self._begin_undisturbed, relays and self.launcher.relays)
            self._wait(names, attempts)
            remotes = attempts.remotes()
        return remotes, with_slot_counts(hosts, remotes)

    def _begin_undisturbed(self, name: str, over: RemoteHost | None) -> RemoteHost:
        with self.wakeup.signals_blocked():
            return self.begin(name, over)

    def begin(self, name: str, over: RemoteHost | None = None) -> RemoteHost:
        """Queries a host, from here or over another host, and returns at once.

        Raises LaunchError if ssh or srun cannot be started.
        """
        launcher = self.launcher
        path = shutil.which(launcher.program) if over is None else launcher.program
        if path is None:
            raise LaunchError(
                f"ranks on {name} are started over {launcher.program}, but there is no {launcher.program} on "
                f"the PATH here: {launcher.package}"
            )
        question = {**self.question, "folder": os.getcwd(), "program": os.path.abspath(self.program)}
        remote = RemoteHost(name, launcher, self.selector, self.display)
        command = launcher.command(path, name)
        where = "" if over is None else f" over {over.name}"
        self.display.detail(f"reaching {name}{where}: {' '.join(command)}")
        try:
            remote.connect(command, question, self.reaper, over)
            if over is not None:  # it is tried from here, and heard, if that fails
                remote.mute()
        except OSError as error:
            raise LaunchError(f"cannot start {path}: {error.strerror}", 126) from None
        return remote

    def _wait(self, names: Sequence[str], attempts: HostAttempts) -> None:
        wakeup = self.wakeup
        progress = Progress(
            "hosts have answered",
            dict(enumerate(names)),
            self.display.show_progress,
            self.display.refreshes,
        )
        progress.begin()
        self.selector.register(wakeup, selectors.EVENT_READ, lambda: _handle_wakeup(wakeup))
        wakeup.unblock_signals()
        while True:
            now = time.monotonic()
            progress.poll(now)
            for index in attempts.advance(now):
                progress.note(index)
            if (due := attempts.due) is None:
                break
            self._iterate(max(min(due, progress.due or due) - now, 0))
        progress.end()
        self.selector.unregister(wakeup)
        wakeup.block_signals()
        if reasons := attempts.failed_relays:
            self.display.detail(f"{len(reasons)} hosts were not reached over others: {reasons[0]}")
        if failures := [remote.failure for remote in attempts.remotes() if remote.failure]:
            self._flush_output()
            raise LaunchError("\nhvdrun: ".join(failures), 1)

    def _iterate(self, timeout: float) -> None:
        self.display.balance()
        for key, _ in self.selector.select(timeout):
            key.data()

    def _flush_output(self) -> None:
        until = time.monotonic() + _SHOW_SECONDS
        while not self.display.all_shown and time.monotonic() < until:
            self._iterate(0.1)


def _handle_wakeup(wakeup: WakeupPipe) -> None:
    for number in wakeup.read():
        if number == signal.SIGTSTP:
            stop_this_process()
        elif number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            raise LaunchError("interrupted before any rank was started", 128 + number)


def with_slot_counts(hosts: Sequence[Host], remotes: Sequence[RemoteHost]) -> list[Host]:
    """Returns the hosts with a slot count; the default is the number of GPUs, or 1 without GPUs."""
    own_gpus = count_gpus()
    gpus = {remote.name: (remote.answer or {}).get("gpus", 0) for remote in remotes}
    return [
        Host(host.name, host.slots or max(1, own_gpus if is_own_host(host.name) else gpus.get(host.name, 0)))
        for host in hosts
    ]


# ---- The order in which hosts are reached: so many at a time, in large jobs over each other's agents ---


ANSWER_SECONDS = CONNECT_SECONDS + 50.0  # for the login, and for Python to start
# Hosts that this machine logs in to at the same time, and hosts of a large job that it holds itself.
AT_A_TIME = 64

Begin = Callable[[str, RemoteHost | None], RemoteHost]


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
