"""Connects to all hosts at the same time, and reports immediately why a host cannot take part."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sirtaki.runner.agent_launcher import AgentLauncher
from sirtaki.runner.display import Display
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.hosts import Host, is_own_host
from sirtaki.runner.progress import Progress
from sirtaki.runner.reaper import Reaper
from sirtaki.runner.remote import RemoteHost
from sirtaki.runner.signals import WakeupPipe, stop_this_process
from sirtaki.runner.ssh import CONNECT_SECONDS

ANSWER_SECONDS = CONNECT_SECONDS + 50.0  # for the login, and for Python to start
_SHOW_SECONDS = 2.0  # time to show the output of ssh or srun before hvdrun ends


@dataclass(frozen=True)
class Connection:
    """The connections to a job's hosts, before any rank has been started."""

    launcher: AgentLauncher
    selector: selectors.BaseSelector
    display: Display
    question: Mapping[str, Any] = field(default_factory=dict)  # to the agents, besides folder and program

    def connect(
        self, hosts: Sequence[Host], program: str, wakeup: WakeupPipe, reaper: Reaper
    ) -> list[RemoteHost]:
        """Queries all hosts except this one; returns when all have answered. Raises LaunchError."""
        names = [host.name for host in hosts if not is_own_host(host.name)]
        if not names:
            return []
        remotes = [self.begin(name, program, reaper) for name in names]
        self._wait(remotes, wakeup)
        return remotes

    def begin(self, name: str, program: str, reaper: Reaper) -> RemoteHost:
        """Queries a host, and returns at once. Raises LaunchError if ssh or srun cannot be started."""
        launcher = self.launcher
        path = shutil.which(launcher.program)
        if path is None:
            raise LaunchError(
                f"ranks on {name} are started over {launcher.program}, but there is no {launcher.program} on "
                f"the PATH here: {launcher.package}"
            )
        question = {**self.question, "folder": os.getcwd(), "program": os.path.abspath(program)}
        remote = RemoteHost(name, launcher, self.selector, self.display)
        command = launcher.command(path, name)
        self.display.detail(f"reaching {name}: {' '.join(command)}")
        try:
            remote.connect(command, question, reaper)
        except OSError as error:
            raise LaunchError(f"cannot start {path}: {error.strerror}", 126) from None
        return remote

    def _wait(self, remotes: Sequence[RemoteHost], wakeup: WakeupPipe) -> None:
        names = {index: remote.name for index, remote in enumerate(remotes)}
        progress = Progress("hosts have answered", names, self.display.show_progress, self.display.refreshes)
        progress.begin()
        deadline = time.monotonic() + ANSWER_SECONDS
        self.selector.register(wakeup, selectors.EVENT_READ, lambda: _handle_wakeup(wakeup))
        wakeup.unblock_signals()
        while awaited := [remote for remote in remotes if remote.answer is None and not remote.failure]:
            now = time.monotonic()
            progress.poll(now)
            for remote in awaited if deadline <= now else ():
                remote.give_up_waiting(ANSWER_SECONDS)
            self._iterate(max(min(deadline, progress.due or deadline) - now, 0))
            for remote in remotes:
                remote.poll()
            for index, remote in enumerate(remotes):
                if remote.answer is not None or remote.failure:
                    progress.note(index)
        progress.end()
        self.selector.unregister(wakeup)
        wakeup.block_signals()
        if failures := [remote.failure for remote in remotes if remote.failure]:
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


def with_slot_counts(hosts: Sequence[Host], remotes: Sequence[RemoteHost], own_gpus: int) -> list[Host]:
    """Returns the hosts with a slot count; the default is one slot per GPU, or else one."""
    gpus = {remote.name: (remote.answer or {}).get("gpus", 0) for remote in remotes}
    return [
        Host(host.name, host.slots or max(1, own_gpus if is_own_host(host.name) else gpus.get(host.name, 0)))
        for host in hosts
    ]
