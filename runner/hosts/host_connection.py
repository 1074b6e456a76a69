"""Connects to the hosts of a job, and reports why a host cannot take part."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors
from sirtaki.runner.hosts.agent_launcher import AgentLauncher
from sirtaki.runner.hosts.host_attempts import HostAttempts
from sirtaki.runner.hosts.remote import RemoteHost
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
