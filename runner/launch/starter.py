"""Starts the processes of a job, static or elastic: on this host, and on other hosts through their agents."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.address import addresses_for_others
from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors
from sirtaki.bindings.bootstrap.connection.wire import Frame
from sirtaki.bindings.bootstrap.job import Job
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.runner.launch.capacity import Capacity, usable_cores
from sirtaki.runner.launch.environment import RankEnvironment, encrypts, exported
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import Host
from sirtaki.runner.launch.job_folder import JobFolder
from sirtaki.runner.launch.process import REPORTS, ProcessStart, RankProcess, start_process
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.supervise.display import Display
from sirtaki.runner.supervise.signals import WakeupPipe

if TYPE_CHECKING:  # needed for some jobs only
    from sirtaki.runner.elastic.spares.host_spares import SpareNews
    from sirtaki.runner.function.service import FunctionService
    from sirtaki.runner.hosts.agent_launcher import AgentLauncher
    from sirtaki.runner.hosts.host_connection import Connection
    from sirtaki.runner.hosts.lease import HostLease
    from sirtaki.runner.hosts.remote import RemoteHost, RemoteRank
    from sirtaki.runner.observe.timeline import JobTimeline
    from sirtaki.runner.supervise.post_mortem import PostMortem

_OUTPUT_FILES = 2  # descriptors of a rank whose output is kept


def ssh_launcher(
    port: int | None = None, identity: Path | None = None, verbose: bool = False
) -> AgentLauncher:
    """Returns the launcher of agents over ssh, which a job on a single host does not import."""
    from sirtaki.runner.hosts.ssh import SshOptions

    return SshOptions(port, identity, verbose)


@dataclass(frozen=True)
class Settings:
    """The user's settings for a job."""

    hosts: Sequence[Host]  # this host is called "localhost"
    size: int | None  # None: one rank for each slot
    command: Sequence[str]  # the path of a program, and its arguments
    start_timeout: float = 120.0  # seconds
    output_folder: Path | None = None
    verbose: bool = False
    additions: Mapping[str, str] = field(default_factory=dict)  # to the ranks' environment
    timeline: JobTimeline | None = None  # of all ranks
    notices: tuple[str, ...] = ()  # shown before anything else
    launcher: Callable[[], AgentLauncher] = ssh_launcher  # returns that of the agents of other hosts
    interfaces: tuple[str, ...] = ()  # the only ones that ranks use to reach each other; () for all
    oversubscribe: bool = False  # start ranks although a host seems to lack capacity for them
    torch_env: bool = False  # set torch's variables for the ranks
    metrics: str | None = None  # the address, "PORT" or "HOST:PORT", at which each host serves metrics
    dashboard: str | None = None  # the address, "PORT" or "HOST:PORT", of the page
    debug_rank: int | None = None  # the rank that is debugged: it has hvdrun's terminal, or
    debug_port: int | None = None  # waits for a debugger here
    servers: int = 0  # processes beside the ranks, which serve tables
    service: FunctionService | None = None  # of a job that `sirtaki.run` has started

    @property
    def terminal_rank(self) -> int | None:
        """Returns the rank that has the terminal of hvdrun."""
        return self.debug_rank if self.debug_port is None else None


class JobStarter:
    """The start of a job's processes, and what it needs.

    Attributes:
        selector: of all descriptors of hvdrun.
        folder: the job's, on this host.
        job: of one rank, until its owner knows their number.
        reports: the folder of the ranks' failure reports: the user's, else the job's.
        keeps_reports: whether that is the user's.
    """

    def __init__(self, settings: Settings, wakeup: WakeupPipe, reaper: Reaper) -> None:
        """Starts nothing yet. Raises LaunchError if there is no place for the job's folder."""
        self.settings, self.wakeup, self.reaper = settings, wakeup, reaper
        self.selector = selectors.PollSelector()  # epoll refuses regular files
        self.display = Display(self.selector, settings.verbose)
        self.folder = JobFolder(reaper)
        encrypt = encrypts({**os.environ, **settings.additions})
        self.job = Job(secrets.token_hex(8), 1, self.folder.key, VERSION, encrypt)
        reports = settings.additions.get(REPORTS) or os.environ.get(REPORTS)
        self.keeps_reports = bool(reports)
        self.reports = Path(reports or self.folder.path).absolute()

    @property
    def on_call(self) -> Callable[[int, Frame], bytes] | None:
        """Returns what answers the calls of ranks, if anything does."""
        return None if self.settings.service is None else self.settings.service.answer

    @cached_property
    def connection(self) -> Connection:
        """Returns the way to other hosts."""
        from sirtaki.runner.hosts.host_connection import Connection

        settings = self.settings
        question: dict[str, Any] = {} if settings.metrics is None else {"metrics": settings.metrics}
        if settings.torch_env:
            question |= {"torch": True, "interfaces": settings.interfaces}
        return Connection(
            settings.launcher(),
            settings.command[0],
            self.selector,
            self.display,
            self.wakeup,
            self.reaper,
            question,
        )

    def say_notices(self) -> None:
        """Shows the notices of the settings."""
        for notice in self.settings.notices:
            self.display.say(notice)

    def allow_descriptors(self, ranks: int, per_rank: int) -> None:
        """Raises hvdrun's limit to so many descriptors for each rank, and for the files of its output."""
        allow_descriptors((per_rank + _OUTPUT_FILES * bool(self.settings.output_folder)) * ranks)

    def capacity(self, ranks: int, servers: int = 0) -> Capacity:
        """Returns the capacity of this host for these processes. Raises LaunchError if it is too small."""
        capacity = Capacity(ranks, usable_cores(), servers=servers)
        if not self.settings.oversubscribe:
            capacity.check()
        return capacity

    def environment(
        self,
        rendezvous: str,
        threads: Mapping[str, str],
        additions: Mapping[str, str],
        torch: Mapping[str, str] | None = None,
    ) -> RankEnvironment:
        """Returns the environment of the processes of this host.

        Args:
            rendezvous: its address.
            threads: the counts of their threads, which the user's settings override.
            additions: override the user's settings.
            torch: torch's variables, of this host.
        """
        settings = self.settings
        additions = {**threads, **settings.additions, REPORTS: str(self.reports), **additions}
        return RankEnvironment(
            self.job.id, rendezvous, self.folder.key_file, settings.start_timeout, additions, torch or {}
        )

    def start_here(self, start: ProcessStart) -> RankProcess:
        """Starts a process on this host, and shows its output. Raises as `start_process`."""
        has_terminal = start.number == self.settings.terminal_rank
        process = start_process(start, self.folder, self.reaper, has_terminal)
        self.display.read_rank(process.rank, process.stdout, process.stderr)
        return process

    def start_agent(
        self,
        remote: RemoteHost,
        rendezvous: str,
        ranks: MutableMapping[int, RemoteRank],
        on_start: Callable[[int, int], None],
        values: Mapping[str, Any],
        additions: Mapping[str, str] | None = None,
        post_mortem: PostMortem | None = None,
        lease: HostLease | None = None,
        spares: SpareNews | None = None,
    ) -> None:
        """Has the agent of a host begin the job.

        Args:
            rendezvous: the addresses, from which those are chosen that other hosts may reach.
            ranks: the processes that the agent starts at once.
            on_start: receives the number and the pid of each process that it has started.
            values: what `AgentJob` needs beside the properties of the job.
            additions: to the environment of the host's processes.
            post_mortem, lease, spares: those of the `RemoteJob`.
        """
        from sirtaki.bindings.observing.watch_marks import FOLDER as STATES
        from sirtaki.runner.hosts.remote import RemoteJob

        settings = self.settings
        reports = {REPORTS: folder} if (folder := os.environ.get(REPORTS)) else {}
        common = {
            "job": self.job.id,
            "key": self.job.key.hex(),
            "rendezvous": addresses_for_others(rendezvous),
            "start_timeout": settings.start_timeout,
            "command": [os.path.abspath(settings.command[0]), *settings.command[1:]],
            "environment": exported(os.environ),
            "additions": {**reports, **settings.additions, **(additions or {})},
            "oversubscribe": settings.oversubscribe,
            "metrics": settings.metrics,
        }
        wake, states = self.wakeup.wake, self.folder.path / STATES
        job = RemoteJob(ranks, post_mortem, on_start, wake, settings.timeline, lease, spares, states)
        remote.start({**common, **values}, job)


def with_starter(settings: Settings, run: Callable[[JobStarter], int]) -> int:
    """Returns the result of `run`, during which signals are blocked until it unblocks them.

    Afterwards the reaper has ended everything that was started. Raises LaunchError if there is no /proc.
    """
    if not os.path.exists("/proc/self/stat"):
        raise LaunchError("sirtaki needs the file system /proc, which is not mounted here", 1)
    with contextlib.closing(WakeupPipe()) as wakeup, Reaper() as reaper:
        wakeup.block_signals()
        return run(JobStarter(settings, wakeup, reaper))


def reachable_server(encrypt: bool, open_server: Callable[[], RendezvousServer]) -> RendezvousServer:
    """Returns a server that other hosts can reach. Raises LaunchError if they cannot, or as `open_server`."""
    if encrypt:
        from sirtaki.bindings.bootstrap.connection.encryption import own_certificate  # opens the core

        own_certificate()
    server = open_server()
    if not addresses_for_others(server.address):
        server.close()
        raise LaunchError("this machine has only loopback addresses, at which other hosts cannot reach it", 1)
    return server
