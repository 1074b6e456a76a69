"""Sets up a static job: hosts, rendezvous and ranks; then the supervisor takes over."""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
import struct
import termios
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sirtaki.bindings.bootstrap.connection.address import (
    addresses_for_others,
    network_address,
    unix_addresses,
)
from sirtaki.bindings.bootstrap.job import Job, RendezvousError, join_names
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.cli.command import runs_python
from sirtaki.runner.launch.capacity import Capacity, usable_cores
from sirtaki.runner.launch.environment import RankEnvironment, exported, thread_counts
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import (
    OWN_HOST,
    HostAllocation,
    allocate,
    is_own_host,
    name_range,
    needed,
    placements_of,
    servers_of,
)
from sirtaki.runner.launch.process import SERVER_COMMAND, Rank, starts_of
from sirtaki.runner.launch.starter import JobStarter, Settings, reachable_server, with_starter
from sirtaki.runner.observe.endpoints import Endpoints, start_endpoints
from sirtaki.runner.supervise.display import Progress
from sirtaki.runner.supervise.failure_analysis import FailureAnalyzer
from sirtaki.runner.supervise.post_mortem import PostMortem
from sirtaki.runner.supervise.supervisor import Mailbox, Supervisor

if TYPE_CHECKING:  # needed for some jobs only
    from sirtaki.runner.hosts.remote import RemoteHost
    from sirtaki.runner.launch.servers import Servers
    from sirtaki.runner.launch.torch_variables import ReservedPort

_PER_RANK = 3  # descriptors: the ends of two pipes, and the connection to the rendezvous


def run_job(settings: Settings) -> int:
    """Runs a job to its end and returns hvdrun's exit code. Raises LaunchError if it cannot start."""
    return with_starter(settings, lambda starter: _Launch(starter).run())


class _Launch:
    """The launch of a job, step by step, from the user's settings to the supervisor."""

    def __init__(self, starter: JobStarter) -> None:
        self._starter = starter
        self._settings = starter.settings
        self._display = starter.display
        self._mailbox = Mailbox(starter.wakeup)
        self._capacity: Capacity | None = None  # for the ranks of this host
        self._servers: Servers | None = None
        self._port: ReservedPort | None = None  # for rank 0, if it is here and torch's variables are set

    def run(self) -> int:
        settings, display, starter = self._settings, self._display, self._starter
        starter.say_notices()
        remotes, allocations = self._connect_hosts()
        placements = self._placements(allocations)
        starter.allow_descriptors(len(placements), _PER_RANK)
        display.expect(len(placements), settings.output_folder)
        self._analyzer = FailureAnalyzer(
            len(placements), settings.start_timeout, runs_python(settings.command), settings.torch_env
        )
        endpoints = self._start_endpoints(allocations)
        job = starter.job = replace(starter.job, size=len(placements))
        callbacks = {"on_event": self._mailbox.put, "on_call": starter.on_call}
        server = self._make_server(job, bool(remotes), accepts_collectors=bool(remotes), **callbacks)
        self._servers = self._make_servers(job, bool(remotes), allocations)
        if settings.service is not None:
            settings.service.note_size(len(placements))
        post_mortem = PostMortem(
            len(placements), starter.reports, starter.keeps_reports, settings.timeline, bool(remotes)
        )
        post_mortem.prepare()
        started: dict[int, Rank] = {}
        torch = self._torch_variables(remotes, allocations)
        for allocation in allocations:  # forks, so it must precede the first thread
            if is_own_host(allocation.host.name):
                environment = self._environment_of(server.address, allocation, torch[allocation.host.name])
                started |= self._start_local(environment, [placements[rank] for rank in allocation.ranks])
        for allocation in allocations:
            for remote in (remote for remote in remotes if remote.name == allocation.host.name):
                values: dict[str, Any] = {"torch": torch[remote.name]}
                values["placements"] = [astuple(placements[rank]) for rank in allocation.ranks]
                values["lease"] = settings.launcher().lease_seconds
                started |= self._start_remote(remote, server.address, allocation.ranks, post_mortem, values)
        server.start()
        if self._servers is not None:
            self._servers.start()
        if settings.terminal_rank is None and _loses_input():
            display.say("standard input is not passed on: every rank reads /dev/null")
        supervisor = Supervisor(
            display,
            starter.selector,
            endpoints,
            starter.wakeup,
            starter.reaper,
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
        size = self._settings.size
        hosts = needed(self._settings.hosts, size)
        allocations = allocate(hosts, size) if all(host.slots for host in hosts) else []
        if allocations and all(is_own_host(allocation.host.name) for allocation in allocations):
            return [], allocations
        remotes, hosts = self._starter.connection.connect(hosts, relays=True)
        return remotes, allocate(hosts, size)

    def _placements(self, allocations: Sequence[HostAllocation]) -> list[RankPlacement]:
        """Returns the placement of each rank. Raises LaunchError if the rank to debug cannot be."""
        _check_debug_rank(self._settings, allocations)
        return placements_of(allocations)

    def _make_servers(
        self, job: Job, several_hosts: bool, allocations: Sequence[HostAllocation]
    ) -> Servers | None:
        """Prepares for the servers of tables, if the user wants any, and creates their rendezvous."""
        if not self._settings.servers:
            return None
        from sirtaki.runner.launch.servers import Servers

        servers = Servers(self._settings.servers, job, allocations, self._mailbox.put)
        callbacks = {"on_event": servers.on_event, "on_message": servers.on_message}
        servers.serve(self._make_server(servers.job, several_hosts, **callbacks))
        for number in servers.numbers:
            self._display.add(number, self._analyzer.name(number), None, self._settings.servers)
        return servers

    def _servers_on(self, host: str) -> Sequence[int]:
        return [] if self._servers is None else self._servers.on_host[host]

    def _make_server(self, job: Job, several_hosts: bool, **callbacks: Any) -> RendezvousServer:
        """Creates the rendezvous: Unix sockets for ranks of this host, TCP on all addresses for others."""
        address = unix_addresses(f"sirtaki-{job.id}", str(self._starter.folder.path))
        settings = self._settings

        def open_server(more: str = "") -> RendezvousServer:
            interfaces = settings.interfaces
            return RendezvousServer(
                address + more, job, settings.start_timeout, interfaces=interfaces, **callbacks
            )

        try:
            if not several_hosts:
                return open_server()
            return reachable_server(job.encrypt, lambda: open_server(f",{network_address()}"))
        except RendezvousError as error:
            raise LaunchError(str(error), 1) from None

    def _start_endpoints(self, allocations: Sequence[HostAllocation]) -> Endpoints:
        """Starts what the user wants to be served: the page, and the metrics of this host's ranks, if any."""
        settings, starter = self._settings, self._starter
        if not any(is_own_host(allocation.host.name) for allocation in allocations):
            settings = replace(settings, metrics=None)
        return start_endpoints(settings, starter.folder.path, starter.reaper, self._display.say)

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
        self, rendezvous: str, allocation: HostAllocation, torch: Mapping[str, str]
    ) -> RankEnvironment:
        cores, ranks, servers = usable_cores(), allocation.ranks, self._servers_on(allocation.host.name)
        threads = thread_counts(len(ranks) + len(servers), cores, os.environ)
        if threads:
            show = self._display.say if self._settings.service is None else self._display.detail
            show(_describe_threads(threads, len(ranks), len(servers), cores))
        additions = {} if self._servers is None else self._servers.variables()
        return self._starter.environment(rendezvous, threads, additions, torch)

    def _start_local(
        self, environment: RankEnvironment, placements: Sequence[RankPlacement]
    ) -> dict[int, Rank]:
        servers, started = self._servers_on(OWN_HOST), dict[int, Rank]()
        self._capacity = self._starter.capacity(len(placements), len(servers))
        for start in starts_of(self._settings.command, environment, os.environ, placements, servers):
            if shortage := self._capacity.shortage(len(started)):
                raise LaunchError(shortage, 1)
            process = started[start.number] = self._starter.start_here(start)
            self._note_start("", start.number, process.pid)
        return started

    def _start_remote(
        self,
        remote: RemoteHost,
        rendezvous: str,
        host_ranks: range,
        post_mortem: PostMortem,
        values: Mapping[str, Any],
    ) -> dict[int, Rank]:
        from sirtaki.runner.hosts.remote_rank import RemoteRank

        servers = self._servers_on(remote.name)
        additions = {} if self._servers is None else self._servers.variables(addresses_for_others)
        ranks = {rank: RemoteRank(rank, remote) for rank in (*host_ranks, *servers)}
        for rank in ranks:
            self._analyzer.note_start(rank, 0, remote.name)
        on_start = partial(self._note_start, remote.name)
        values = {**values, "servers": servers}
        self._starter.start_agent(remote, rendezvous, ranks, on_start, values, additions, post_mortem)
        return dict(ranks)

    def _note_start(self, host: str, number: int, pid: int) -> None:
        self._analyzer.note_start(number, pid, host)
        where = f" on {host}" if host else ""
        command = self._settings.command if number < self._analyzer.size else SERVER_COMMAND
        self._display.detail(f"{self._analyzer.name(number)} is pid {pid}{where}: {' '.join(command)}")

    def _progress(self, allocations: Sequence[HostAllocation]) -> Progress:
        names = {
            rank: f"rank {rank}" + ("" if is_own_host(allocation.host.name) else f" ({allocation.host.name})")
            for allocation in allocations
            for rank in allocation.ranks
        }
        return Progress("ranks are here", names, self._display.show_progress, self._display.refreshes)


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
    shares = allocate(with_slot_counts(hosts, []), settings.size)
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
