"""Sets up a job: reaper, hosts, key, rendezvous and ranks; then the supervisor takes over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import shlex
import socket
import stat
import struct
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.address import unix_address
from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors
from sirtaki.bindings.bootstrap.job import Job, RendezvousError, join_names
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.cli.command import runs_python
from sirtaki.runner.launch.capacity import Capacity, count_gpus, usable_cores
from sirtaki.runner.launch.environment import RankEnvironment, encrypts, exported, thread_counts
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import (
    OWN_HOST,
    Host,
    HostAllocation,
    allocate,
    is_own_host,
    name_range,
    needed,
    placements_of,
    servers_of,
)
from sirtaki.runner.launch.job_folder import JobFolder
from sirtaki.runner.launch.process import REPORTS, SERVER_COMMAND, Rank, start_processes, starts_of
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.observe.endpoints import Endpoints, metrics_question, start_endpoints
from sirtaki.runner.supervise.display import Display, Progress
from sirtaki.runner.supervise.failure_analysis import FailureAnalyzer
from sirtaki.runner.supervise.post_mortem import PostMortem
from sirtaki.runner.supervise.signals import WakeupPipe
from sirtaki.runner.supervise.supervisor import Mailbox, Supervisor

if TYPE_CHECKING:  # needed for some jobs only
    from sirtaki.runner.function.service import FunctionService
    from sirtaki.runner.hosts.agent_launcher import AgentLauncher
    from sirtaki.runner.hosts.remote import RemoteHost
    from sirtaki.runner.launch.servers import Servers
    from sirtaki.runner.launch.torch_variables import ReservedPort
    from sirtaki.runner.observe.job_timeline import JobTimeline

_PER_RANK = 3  # descriptors: the ends of two pipes, and the connection to the rendezvous
OUTPUT_FILES = 2  # of a rank whose output is kept


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


def run_job(settings: Settings) -> int:
    """Runs a job to its end and returns hvdrun's exit code. Raises LaunchError if it cannot start."""
    return with_reaper(lambda wakeup, reaper: _Launch(settings, wakeup, reaper).run())


def with_reaper(run: Callable[[WakeupPipe, Reaper], int]) -> int:
    """Returns the result of `run`, during which signals are blocked until it unblocks them.

    Afterwards the reaper has ended everything that was started. Raises LaunchError if there is no /proc.
    """
    if not os.path.exists("/proc/self/stat"):
        raise LaunchError("sirtaki needs the file system /proc, which is not mounted here", 1)
    with contextlib.closing(WakeupPipe()) as wakeup, Reaper() as reaper:
        wakeup.block_signals()
        return run(wakeup, reaper)


class _Launch:
    """The launch of a job, step by step, from the user's settings to the supervisor."""

    def __init__(self, settings: Settings, wakeup: WakeupPipe, reaper: Reaper) -> None:
        self._settings = settings
        self._wakeup = wakeup
        self._reaper = reaper
        self._mailbox = Mailbox(wakeup)
        self._selector = selectors.PollSelector()  # epoll refuses regular files
        self._display = Display(self._selector, settings.verbose)
        self._capacity: Capacity | None = None  # for the ranks of this host
        self._servers: Servers | None = None
        self._port: ReservedPort | None = None  # for rank 0, if it is here and torch's variables are set

    def run(self) -> int:
        settings, display = self._settings, self._display
        for notice in settings.notices:
            display.say(notice)
        remotes, allocations = self._connect_hosts()
        placements = self._placements(allocations)
        allow_descriptors((_PER_RANK + OUTPUT_FILES * bool(settings.output_folder)) * len(placements))
        display.expect(len(placements), settings.output_folder)
        self._analyzer = FailureAnalyzer(
            len(placements), settings.start_timeout, runs_python(settings.command), settings.torch_env
        )
        job_folder = JobFolder(self._reaper)
        folder, key_file = job_folder.path, job_folder.key_file
        endpoints = self._start_endpoints(folder, allocations)
        encrypt = encrypts({**os.environ, **settings.additions})
        job = Job(secrets.token_hex(8), len(placements), job_folder.key, VERSION, encrypt)
        on_call = None if settings.service is None else settings.service.answer
        callbacks = {"on_event": self._mailbox.put, "on_call": on_call}
        server = self._make_server(job, folder, bool(remotes), accepts_collectors=bool(remotes), **callbacks)
        self._servers = self._make_servers(job, folder, bool(remotes), allocations)
        if settings.service is not None:
            settings.service.note_size(len(placements))
        post_mortem = self._make_post_mortem(len(placements), folder, bool(remotes))
        started: dict[int, Rank] = {}
        torch = self._torch_variables(remotes, allocations)
        for allocation in allocations:  # forks, so it must precede the first thread
            if is_own_host(allocation.host.name):
                environment = self._environment_of(job, server.address, key_file, post_mortem, allocation)
                environment = replace(environment, torch=torch[allocation.host.name])
                started |= self._start_local(environment, [placements[rank] for rank in allocation.ranks])
        for allocation in allocations:
            for remote in (remote for remote in remotes if remote.name == allocation.host.name):
                values = start_values(settings, job, server.address)
                values["placements"] = [astuple(placements[rank]) for rank in allocation.ranks]
                values |= {"torch": torch[remote.name], "lease": settings.launcher().lease_seconds}
                started |= self._start_remote(remote, values, allocation.ranks, post_mortem, folder)
        server.start()
        if self._servers is not None:
            self._servers.start()
        if settings.terminal_rank is None and _loses_input():
            display.say("standard input is not passed on: every rank reads /dev/null")
        supervisor = Supervisor(
            display,
            self._selector,
            endpoints,
            self._wakeup,
            self._reaper,
            [started[number] for number in sorted(started)],
            remotes,
            self._analyzer,
            server,
            post_mortem,
            self._progress(allocations),
            self._mailbox,
            settings.service,
            self._servers,
        )
        if self._capacity is not None:
            supervisor.watch_memory(self._capacity, settings.start_timeout)
        return supervisor.run()

    def _connect_hosts(self) -> tuple[list[RemoteHost], list[HostAllocation]]:
        """Connects to the other hosts, if any; returns them, and the ranks of each host."""
        settings = self._settings
        hosts = needed(settings.hosts, settings.size)
        allocations = allocate(hosts, settings.size) if all(host.slots for host in hosts) else []
        if allocations and all(is_own_host(allocation.host.name) for allocation in allocations):
            return [], allocations
        from sirtaki.runner.hosts.host_connection import Connection, with_slot_counts

        question: dict[str, Any] = metrics_question(settings)
        if settings.torch_env:
            question |= {"torch": True, "interfaces": settings.interfaces}
        connection = Connection(settings.launcher(), self._selector, self._display, question)
        remotes = connection.connect(hosts, settings.command[0], self._wakeup, self._reaper, relays=True)
        return remotes, allocate(with_slot_counts(hosts, remotes, count_gpus()), settings.size)

    def _placements(self, allocations: Sequence[HostAllocation]) -> list[RankPlacement]:
        """Returns the placement of each rank. Raises LaunchError if the rank to debug cannot be."""
        _check_debug_rank(self._settings, allocations)
        return placements_of(allocations)

    def _make_servers(
        self, job: Job, folder: Path, several_hosts: bool, allocations: Sequence[HostAllocation]
    ) -> Servers | None:
        """Prepares for the servers of tables, if the user wants any, and creates their rendezvous."""
        if not self._settings.servers:
            return None
        from sirtaki.runner.launch.servers import Servers

        servers = Servers(self._settings.servers, job, allocations, self._mailbox.put)
        callbacks = {"on_event": servers.on_event, "on_message": servers.on_message}
        servers.serve(self._make_server(servers.job, folder, several_hosts, **callbacks))
        for number in servers.numbers:
            self._display.add(number, self._analyzer.name(number), None, self._settings.servers)
        return servers

    def _servers_on(self, host: str) -> Sequence[int]:
        return [] if self._servers is None else self._servers.on_host[host]

    def _make_server(self, job: Job, folder: Path, several_hosts: bool, **callbacks: Any) -> RendezvousServer:
        """Creates the rendezvous: Unix sockets for this host's ranks, TCP on all addresses for other hosts.

        The abstract socket serves another init() after the system has cleaned the job's folder away.
        """
        name = f"sirtaki-{job.id}"
        address = ",".join(dict.fromkeys([unix_address(name, str(folder)), unix_address(name)]))
        if several_hosts:
            address += f",{network_address()}"
        settings = self._settings
        try:
            if several_hosts and job.encrypt:
                from sirtaki.bindings.bootstrap.connection.encryption import own_certificate  # opens the core

                own_certificate()
            server = RendezvousServer(
                address, job, settings.start_timeout, interfaces=settings.interfaces, **callbacks
            )
        except RendezvousError as error:
            raise LaunchError(str(error), 1) from None
        if several_hosts:
            try:
                check_reachable(server.address)
            except LaunchError:
                server.close()
                raise
        return server

    def _start_endpoints(self, folder: Path, allocations: Sequence[HostAllocation]) -> Endpoints:
        """Starts what the user wants to be served: the page, and the metrics of this host's ranks, if any."""
        settings = self._settings
        if not any(is_own_host(allocation.host.name) for allocation in allocations):
            settings = replace(settings, metrics=None)
        return start_endpoints(settings, folder, self._reaper, self._display.say)

    def _torch_variables(
        self, remotes: Sequence[RemoteHost], allocations: Sequence[HostAllocation]
    ) -> dict[str, dict[str, str]]:
        """Returns torch's variables of each host; none without --torch-env."""
        names = [allocation.host.name for allocation in allocations]
        if not self._settings.torch_env:
            return {name: {} for name in names}
        from sirtaki.runner.launch.torch_variables import ReservedPort, offer_of_own_host, variables_of_hosts

        offers = {remote.name: remote.master_offer for remote in remotes if remote.master_offer is not None}
        if is_own_host(names[0]):
            self._port = ReservedPort()
            offer = offer_of_own_host(self._port, list(offers.values()), self._settings.interfaces)
        else:
            offer = offers[names[0]]
        return variables_of_hosts(names, offer)

    def _environment_of(
        self, job: Job, rendezvous: str, key_file: str, post_mortem: PostMortem, allocation: HostAllocation
    ) -> RankEnvironment:
        settings = self._settings
        cores, ranks, servers = usable_cores(), allocation.ranks, self._servers_on(allocation.host.name)
        threads = thread_counts(len(ranks) + len(servers), cores, os.environ)
        if threads:
            show = self._display.say if settings.service is None else self._display.detail
            show(_describe_threads(threads, len(ranks), len(servers), cores))
        additions = {**threads, **settings.additions, REPORTS: str(post_mortem.reports)}
        if self._servers is not None:
            additions |= self._servers.variables()
        return RankEnvironment(job.id, rendezvous, key_file, settings.start_timeout, additions)

    def _start_local(
        self, environment: RankEnvironment, placements: Sequence[RankPlacement]
    ) -> dict[int, Rank]:
        settings, servers = self._settings, self._servers_on(OWN_HOST)
        capacity = self._capacity = Capacity(len(placements), usable_cores(), servers=len(servers))
        if not settings.oversubscribe:
            capacity.check()
        starts = starts_of(settings.command, environment, os.environ, placements, servers)
        started = start_processes(starts, self._reaper, capacity, settings.terminal_rank)
        for process in started:
            self._display.read_rank(process.rank, process.stdout, process.stderr)
            self._note_start("", process.rank, process.pid)
        return {process.rank: process for process in started}

    def _start_remote(
        self,
        remote: RemoteHost,
        values: dict[str, Any],
        host_ranks: range,
        post_mortem: PostMortem,
        folder: Path,
    ) -> dict[int, Rank]:
        from sirtaki.bindings.observing.watch_marks import FOLDER as STATES
        from sirtaki.runner.hosts.remote import RemoteJob
        from sirtaki.runner.hosts.remote_rank import RemoteRank

        servers = self._servers_on(remote.name)
        if self._servers is not None:
            values["additions"] |= self._servers.variables(addresses_for_others)
            values["servers"] = servers
        ranks = {rank: RemoteRank(rank, remote) for rank in (*host_ranks, *servers)}
        for rank in ranks:
            self._analyzer.note_start(rank, 0, remote.name)
        on_start, timeline = partial(self._note_start, remote.name), self._settings.timeline
        job = RemoteJob(ranks, post_mortem, on_start, self._wakeup.wake, timeline, states=folder / STATES)
        remote.start(values, job)
        return dict(ranks)

    def _note_start(self, host: str, number: int, pid: int) -> None:
        self._analyzer.note_start(number, pid, host)
        where = f" on {host}" if host else ""
        command = self._settings.command if number < self._analyzer.size else SERVER_COMMAND
        self._display.detail(f"{self._analyzer.name(number)} is pid {pid}{where}: {' '.join(command)}")

    def _make_post_mortem(self, size: int, job_folder: Path, several_hosts: bool) -> PostMortem:
        """Creates the post-mortem. Failure reports go to the folder that the user chose, else the job's."""
        folder = self._settings.additions.get(REPORTS) or os.environ.get(REPORTS)
        reports, timeline = Path(folder or job_folder).absolute(), self._settings.timeline
        post_mortem = PostMortem(size, reports, bool(folder), timeline, several_hosts)
        post_mortem.prepare()
        return post_mortem

    def _progress(self, allocations: Sequence[HostAllocation]) -> Progress:
        names = {
            rank: f"rank {rank}" + ("" if is_own_host(allocation.host.name) else f" ({allocation.host.name})")
            for allocation in allocations
            for rank in allocation.ranks
        }
        return Progress("ranks are here", names, self._display.show_progress, self._display.refreshes)


def start_values(settings: Settings, job: Job, rendezvous: str) -> dict[str, Any]:
    """Returns what an agent needs to start ranks: the input of `AgentJob`, but for their placements."""
    additions = dict(settings.additions)
    if folder := os.environ.get(REPORTS):
        additions.setdefault(REPORTS, folder)
    return {
        "job": job.id,
        "key": job.key.hex(),
        "rendezvous": addresses_for_others(rendezvous),
        "start_timeout": settings.start_timeout,
        "command": [os.path.abspath(settings.command[0]), *settings.command[1:]],
        "environment": exported(os.environ),
        "additions": additions,
        "oversubscribe": settings.oversubscribe,
        "metrics": settings.metrics,
    }


def network_address() -> str:
    """Returns the address of a server that listens on all of this machine's interfaces."""
    return "[::]:0" if socket.has_dualstack_ipv6() else "0.0.0.0:0"


def check_reachable(rendezvous: str) -> None:
    """Raises LaunchError if other hosts cannot reach any of these addresses."""
    if not addresses_for_others(rendezvous):
        raise LaunchError("this machine has only loopback addresses, at which other hosts cannot reach it", 1)


def addresses_for_others(rendezvous: str) -> str:
    """Returns the rendezvous's addresses that ranks of other hosts may be able to reach."""
    found = [
        address for address in rendezvous.split(",") if not address.startswith(("unix:", "127.", "[::1]"))
    ]
    return ",".join(found)


def _describe_threads(threads: Mapping[str, str], size: int, servers: int, cores: int) -> str:
    name, count = next(iter(threads.items()))
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    if servers:
        ranks += " and 1 server" if servers == 1 else f" and {servers} servers"
    usable = "1 usable core" if cores == 1 else f"{cores} usable cores"
    return f"{ranks} on {usable}: {name}={count} for each (set it yourself to change that)"


def _check_debug_rank(settings: Settings, allocations: Sequence[HostAllocation]) -> None:
    """Raises LaunchError if there is no such rank, or it needs the terminal and is not on this host."""
    rank = settings.debug_rank
    here = [is_own_host(allocation.host.name) for allocation in allocations if rank in allocation.ranks]
    if rank is not None and not here:
        last = max(allocation.ranks[-1] for allocation in allocations)
        raise LaunchError(f"there is no rank {rank} for --debug-rank: the last rank is {last}")
    if settings.terminal_rank is not None and not any(here):
        raise LaunchError(
            f"rank {rank} of --debug-rank does not run on this host, whose terminal it would need: choose a "
            "rank that does, or let a debugger connect to it, --debug-port 5678"
        )


def _loses_input() -> bool:
    """Returns whether input for hvdrun would be lost: a non-empty file, or a pipe with data in it."""
    status = os.fstat(0)
    if stat.S_ISREG(status.st_mode):
        return status.st_size > 0
    if not stat.S_ISFIFO(status.st_mode):
        return False
    return struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, b"\0" * 4))[0] > 0


# ---- --dry-run: shows which ranks would run where. Starts nothing, contacts no host, shows no secrets --


def show_layout(settings: Settings) -> int:
    """Prints the layout and returns hvdrun's exit code. Raises LaunchError if there are too few slots."""
    for line in _describe_layout(settings):
        print(line)
    return 0


def _describe_layout(settings: Settings) -> Iterator[str]:
    from sirtaki.runner.hosts.host_connection import with_slot_counts

    hosts = needed(settings.hosts, settings.size)
    unknown = [host.name for host in hosts if host.slots is None and not is_own_host(host.name)]
    yield from settings.notices
    yield f"command: {shlex.join(settings.command)}"
    yield f"folder: {os.getcwd()}"
    for name, value in settings.additions.items():
        yield f"setting: {name}={value}"
    if settings.torch_env:
        yield "torch's variables are set: RANK, WORLD_SIZE, MASTER_ADDR and others"
    if settings.metrics is not None:
        yield f"each host with ranks serves metrics at {settings.metrics} (--metrics-port)"
    if settings.dashboard is not None:
        yield f"this host serves a page with all ranks at {settings.dashboard} (--dashboard)"
    if any(not is_own_host(host.name) for host in hosts):
        count = len(exported(os.environ))
        way = f"through {settings.launcher().program}'s input"
        yield f"{count} of this host's environment variables are sent to other hosts, {way}"
    shares = allocate(with_slot_counts(hosts, [], count_gpus()), settings.size)
    for share in shares:
        name = share.host.name
        yield f"{name}: {name_range(share.ranks)}" + (
            " (if it has no GPUs; otherwise one rank per GPU)" if name in unknown else ""
        )
        if servers := servers_of(share, shares, range(settings.servers)):
            yield f"{name}: {join_names(f'server {index}' for index in servers)}"
        if not is_own_host(name):
            launcher = settings.launcher()
            yield f"  {shlex.join(launcher.command(launcher.program, name))}"
