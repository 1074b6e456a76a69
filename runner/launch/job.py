"""A static job of hvdrun: starts its ranks, and supervises them to their end."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import stat
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sirtaki.bindings.bootstrap.connection.address import (
    addresses_for_others,
    network_address,
    unix_addresses,
)
from sirtaki.bindings.bootstrap.job import ASK_TO_STOP, STOPPED, Job, RendezvousError, join_names, name_ranks
from sirtaki.bindings.bootstrap.messages import RankEvent, describe
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
from sirtaki.runner.supervise.display import Progress
from sirtaki.runner.supervise.failure_analysis import ExitStatus, FailureAnalyzer, JobFailure
from sirtaki.runner.supervise.main_loop import KILL_SECONDS, MainLoop
from sirtaki.runner.supervise.post_mortem import PostMortem
from sirtaki.runner.supervise.signals import WakeupPipe

if TYPE_CHECKING:  # needed for some jobs only
    from sirtaki.runner.hosts.remote import RemoteHost
    from sirtaki.runner.launch.servers import Servers
    from sirtaki.runner.launch.torch_variables import ReservedPort

_PER_RANK = 3  # descriptors: the ends of two pipes, and the connection to the rendezvous
ANALYSIS_SECONDS = 0.5  # after the first failure, so that the rank that caused it can be identified
REPORT_POLL_SECONDS = 0.01  # no event announces that a rank has written its report
DRAIN_SECONDS = 1.0  # for the last reports of ranks to arrive when all have ended
STOP_SECONDS = 600.0  # for ranks that save before they end, as hvd.should_stop() tells them
INTERRUPTED, TERMINATED = "was interrupted", "was terminated"  # events of a `JobFailure`


def run_job(settings: Settings) -> int:
    """Runs a job to its end and returns hvdrun's exit code. Raises LaunchError if it cannot start."""
    return with_starter(settings, lambda starter: StaticJob(starter).run())


class Mailbox:
    """Messages from other threads to the main loop."""

    def __init__(self, wakeup: WakeupPipe) -> None:
        self._wakeup = wakeup
        self._events: deque[RankEvent] = deque()

    def put(self, event: RankEvent) -> None:
        self._events.append(event)
        self._wakeup.wake()

    def drain(self) -> list[RankEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]


class StaticJob(MainLoop):
    """A job of fixed ranks: their start, their rendezvous, and the verdict on a failure."""

    def __init__(self, starter: JobStarter) -> None:
        """Starts the ranks. Raises LaunchError."""
        super().__init__(starter)
        settings, display = self.settings, self.display
        self._mailbox = Mailbox(starter.wakeup)
        self._capacity: Capacity | None = None  # for the ranks of this host, while they start
        self._servers: Servers | None = None
        self._port: ReservedPort | None = None  # for rank 0, if it is here and torch's variables are set
        starter.say_notices()
        self._hosts, allocations = self._connect_hosts()  # the hosts other than this one
        placements = self._placements(allocations)
        starter.allow_descriptors(len(placements), _PER_RANK)
        display.expect(len(placements), settings.output_folder)
        self._analyzer = FailureAnalyzer(
            len(placements), settings.start_timeout, runs_python(settings.command), settings.torch_env
        )
        if any(is_own_host(allocation.host.name) for allocation in allocations):
            self.endpoints.serve_metrics(settings.metrics)
        self.endpoints.serve_page(settings.dashboard)
        starter.job = replace(starter.job, size=len(placements))
        callbacks = {"on_event": self._mailbox.put, "on_call": starter.on_call}
        self._server = self._make_server(starter.job, accepts_collectors=bool(self._hosts), **callbacks)
        self._servers = self._make_servers(allocations)
        if settings.service is not None:
            settings.service.note_size(len(placements))
        self._post_mortem = PostMortem(
            len(placements), starter.reports, starter.keeps_reports, settings.timeline, bool(self._hosts)
        )
        self._post_mortem.prepare()
        started = self._start_ranks(allocations, placements)
        self._processes = [started[number] for number in sorted(started)]  # ranks, then servers of tables
        self._ranks = self._processes[: self._analyzer.size]
        self._server.start()
        if self._servers is not None:
            self._servers.start()
        if settings.terminal_rank is None and _loses_input():
            display.say("standard input is not passed on: every rank reads /dev/null")
        self._progress = self._make_progress(allocations)
        self._stragglers = Stragglers(display.say)
        self._failure: JobFailure | None = None  # set once it is certain that the job has failed
        self._can_stop: set[int] = set()  # ranks that call hvd.should_stop()
        self._stopped: list[int] = []  # ranks that have ended because of that
        self._decide_at: float | None = None
        self._drained_at: float | None = None  # when to wait no longer for the last reports
        if self._capacity is not None:
            self._capacity.watch(settings.start_timeout)

    # ---- The start -------------------------------------------------------------------------------------

    def _connect_hosts(self) -> tuple[list[RemoteHost], list[HostAllocation]]:
        """Connects to the other hosts, if any; returns them, and the ranks of each host."""
        size = self.settings.size
        hosts = needed(self.settings.hosts, size)
        allocations = allocate(hosts, size) if all(host.slots for host in hosts) else []
        if allocations and all(is_own_host(allocation.host.name) for allocation in allocations):
            return [], allocations
        remotes, hosts = self.starter.connection.connect(hosts, relays=True)
        return remotes, allocate(hosts, size)

    def _placements(self, allocations: Sequence[HostAllocation]) -> list[RankPlacement]:
        """Returns the placement of each rank. Raises LaunchError if the rank to debug cannot be."""
        _check_debug_rank(self.settings, allocations)
        return placements_of(allocations)

    def _make_servers(self, allocations: Sequence[HostAllocation]) -> Servers | None:
        """Prepares for the servers of tables, if the user wants any, and creates their rendezvous."""
        if not self.settings.servers:
            return None
        from sirtaki.runner.launch.servers import Servers

        servers = Servers(self.settings.servers, self.starter.job, allocations, self._mailbox.put)
        callbacks = {"on_event": servers.on_event, "on_message": servers.on_message}
        servers.serve(self._make_server(servers.job, **callbacks))
        for number in servers.numbers:
            self.display.add(number, self._analyzer.name(number), None, self.settings.servers)
        return servers

    def _servers_on(self, host: str) -> Sequence[int]:
        return [] if self._servers is None else self._servers.on_host[host]

    def _make_server(self, job: Job, **callbacks: Any) -> RendezvousServer:
        """Creates the rendezvous: Unix sockets for ranks of this host, TCP for different hosts."""
        address = unix_addresses(f"sirtaki-{job.id}", str(self.starter.folder.path))
        settings = self.settings

        def open_server(more: str = "") -> RendezvousServer:
            interfaces = settings.interfaces
            return RendezvousServer(
                address + more, job, settings.start_timeout, interfaces=interfaces, **callbacks
            )

        try:
            if not self._hosts:
                return open_server()
            return reachable_server(job.encrypt, lambda: open_server(f",{network_address()}"))
        except RendezvousError as error:
            raise LaunchError(str(error), 1) from None

    def _start_ranks(
        self, allocations: Sequence[HostAllocation], placements: Sequence[RankPlacement]
    ) -> dict[int, Rank]:
        """Starts all processes of the job; forks, so it must precede the first thread."""
        started: dict[int, Rank] = {}
        torch = self._torch_variables(allocations)
        for allocation in allocations:
            name = allocation.host.name
            if is_own_host(name):
                environment = self._environment_of(allocation, torch[name])
                started |= self._start_local(environment, [placements[rank] for rank in allocation.ranks])
        for allocation in allocations:
            for remote in (remote for remote in self._hosts if remote.name == allocation.host.name):
                values: dict[str, Any] = {"torch": torch[remote.name]}
                values["placements"] = [astuple(placements[rank]) for rank in allocation.ranks]
                values["lease"] = self.settings.launcher().lease_seconds
                started |= self._start_remote(remote, allocation.ranks, values)
        return started

    def _torch_variables(self, allocations: Sequence[HostAllocation]) -> dict[str, dict[str, str]]:
        """Returns torch's variables of each host; none without --torch-env."""
        names = [allocation.host.name for allocation in allocations]
        if not self.settings.torch_env:
            return {name: {} for name in names}
        from sirtaki.runner.launch.torch_variables import ReservedPort, offer_of_own_host, variables_of_hosts

        offers = {
            remote.name: remote.master_offer for remote in self._hosts if remote.master_offer is not None
        }
        if is_own_host(names[0]):
            self._port = ReservedPort()
            offer = offer_of_own_host(self._port, list(offers.values()), self.settings.interfaces)
        else:
            offer = offers[names[0]]
        return variables_of_hosts(names, offer)

    def _environment_of(self, allocation: HostAllocation, torch: Mapping[str, str]) -> RankEnvironment:
        cores, ranks, servers = usable_cores(), allocation.ranks, self._servers_on(allocation.host.name)
        threads = thread_counts(len(ranks) + len(servers), cores, os.environ)
        if threads:
            show = self.display.say if self.settings.service is None else self.display.detail
            show(_describe_threads(threads, len(ranks), len(servers), cores))
        additions = {} if self._servers is None else self._servers.variables()
        return self.starter.environment(self._server.address, threads, additions, torch)

    def _start_local(
        self, environment: RankEnvironment, placements: Sequence[RankPlacement]
    ) -> dict[int, Rank]:
        servers, started = self._servers_on(OWN_HOST), dict[int, Rank]()
        self._capacity = self.starter.capacity(len(placements), len(servers))
        for start in starts_of(self.settings.command, environment, os.environ, placements, servers):
            if shortage := self._capacity.shortage(len(started)):
                raise LaunchError(shortage, 1)
            process = started[start.number] = self.starter.start_here(start)
            self._note_start("", start.number, process.pid)
        return started

    def _start_remote(
        self, remote: RemoteHost, host_ranks: range, values: Mapping[str, Any]
    ) -> dict[int, Rank]:
        from sirtaki.runner.hosts.remote import RemoteRank

        servers = self._servers_on(remote.name)
        additions = {} if self._servers is None else self._servers.variables(addresses_for_others)
        ranks = {rank: RemoteRank(rank, remote) for rank in (*host_ranks, *servers)}
        for rank in ranks:
            self._analyzer.note_start(rank, 0, remote.name)
        on_start = partial(self._note_start, remote.name)
        values = {**values, "servers": servers}
        address, post_mortem = self._server.address, self._post_mortem
        self.starter.start_agent(remote, address, ranks, on_start, values, additions, post_mortem)
        return dict(ranks)

    def _note_start(self, host: str, number: int, pid: int) -> None:
        self._analyzer.note_start(number, pid, host)
        where = f" on {host}" if host else ""
        command = self.settings.command if number < self._analyzer.size else SERVER_COMMAND
        self.display.detail(f"{self._analyzer.name(number)} is pid {pid}{where}: {' '.join(command)}")

    def _make_progress(self, allocations: Sequence[HostAllocation]) -> Progress:
        names = {
            rank: f"rank {rank}" + ("" if is_own_host(allocation.host.name) else f" ({allocation.host.name})")
            for allocation in allocations
            for rank in allocation.ranks
        }
        return Progress("ranks are here", names, self.display.show_progress, self.display.refreshes)

    # ---- The loop --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Supervises the job; returns hvdrun's exit code when all descendants have ended and all is shown."""
        self.begin()
        self._handle_wakeup()
        self.run_until(lambda: all(process.exit_status for process in self._processes))
        self._drain()
        self._server.close()
        if self._servers is not None:
            self._servers.close()
        self._decide()
        self._finish_hosts()
        for process in self._processes:
            process.reap()
        failed = self._failure is not None and self._analyzer.failed
        summary = self._post_mortem.lines(self._failure.event if self._failure and failed else "")
        self.conclude(lambda: self._show_result(summary))
        return self._failure.exit_code if self._failure else 0

    def _drain(self) -> None:
        """Waits for reports that ranks sent before they ended.

        The reports of another host may arrive later than the news of the ranks' ends.
        """
        found: list[Sequence[int]] = []

        def note(ranks: Sequence[int]) -> None:
            found.append(ranks)
            self.wakeup.wake()

        lost = [rank.rank for rank in self._ranks if rank.exit_status and rank.exit_status.lost]
        self._server.drain(DRAIN_SECONDS, note, lost)
        deadline = self._drained_at = time.monotonic() + 2 * DRAIN_SECONDS  # even if its thread has ended
        self.run_until(lambda: bool(found) or self.patience.has_ended or time.monotonic() >= deadline)
        self._drained_at = None
        if missing := [rank for ranks in found for rank in ranks]:
            self.display.say(
                f"the last reports of {name_ranks(missing)} may be missing: the agent of their host has not "
                f"passed them on within {DRAIN_SECONDS:g} s"
            )

    def _decide(self) -> None:
        """Decides whether the job has failed, now that all has been reported."""
        for event in self._mailbox.drain():
            self._analyzer.note_event(event)
        if self._failure is None and self._analyzer.failed:
            self._failure = self._analyze()
        if self._failure is None and self._stopped:
            ended = f"{name_ranks(sorted(self._stopped))} ended with exit code {STOPPED}"
            self._failure = JobFailure(STOPPED, f"stopped early, by hvd.should_stop(): {ended}")
        if self._failure is not None:
            self._failure = self._analyzer.with_late_reason(self._failure)
        self._decide_at = self.kill_at = None
        self.endpoints.release()
        self._progress.end()
        self._stragglers.end()

    def _finish_hosts(self) -> None:
        """Orders the agents to send their ranks' remaining files, and to end."""
        for host in self._hosts:
            host.finish()
        self.await_hosts()
        for host in self._hosts:
            if not (host.done or host.lost or self.patience.has_ended):
                self.display.say(f"the last output of ranks on {host.name} may be missing: {host.failure}")

    def _all_is_known(self) -> bool:
        """Returns whether the culprit is known, and all survivors have written what they were doing."""
        return self._analyzer.conclusive and self._post_mortem.has_reports_of(self._analyzer.survivors)

    def _analyze(self) -> JobFailure:
        for rank, report in self._post_mortem.read_reports().items():
            self._analyzer.note_report(rank, report)
        return self._analyzer.failure()

    def moments(self) -> Sequence[float | None]:
        moments = [self._drained_at, self._progress.due, self._stragglers.due]
        if self._drained_at is None:  # after the last reports more is known
            moments.append(self._decide_at)
            if self._decide_at is not None and self._analyzer.conclusive:
                moments.append(time.monotonic() + REPORT_POLL_SECONDS)
        moments += [self._capacity.due] if self._capacity is not None else []
        moments += [self._servers.end_due] if self._servers is not None and self._failure is None else []
        return moments

    def advance(self) -> None:
        for host in self._hosts:
            host.poll()
        now = time.monotonic()
        due = self._decide_at if self._drained_at is None else None
        if due is not None and (due <= now or self._all_is_known()):
            self._end(self._analyze(), signal.SIGTERM)
        self._progress.poll(now)
        self._stragglers.poll(now, self._running_ranks())
        if self._capacity is not None and self._failure is None and (shortage := self._capacity.poll(now)):
            self._end(JobFailure(1, shortage), signal.SIGTERM)
            self._kill()
        if (
            self._servers is not None
            and self._failure is None
            and (overdue := self._servers.overdue(now, map(self._analyzer.name, self.running())))
        ):
            self._end(JobFailure(1, overdue), signal.SIGTERM)

    def note_changes(self) -> None:
        for event in self._mailbox.drain():
            show = self.display.say if event.kind == "refused" else self.display.detail
            show(f"the rendezvous reports that {describe(event, self._analyzer.name)}")
            self._analyzer.note_event(event)
            self._note_arrival(event)
        for process in self._processes:
            if status := process.check():
                self._note_exit(status)
        if self._servers is not None and not self._running_ranks():
            self._servers.end()
        if self._analyzer.failed and self._failure is None and self._decide_at is None:
            self._decide_at = time.monotonic() + ANALYSIS_SECONDS
            self._progress.end()
            self._stragglers.end()
            for host in self._hosts:
                host.collect()

    def _note_exit(self, status: ExitStatus) -> None:
        if status.code == STOPPED and status.rank in self._can_stop:
            self._stopped.append(status.rank)
            status = replace(status, code=0)  # no failure, on which the ranks that still save would be ended
        self._analyzer.note_exit(status)
        self.display.detail(f"{self._analyzer.name(status.rank)} has ended with exit code {status.exit_code}")
        if status.failed:
            return
        reason = self._analyzer.describe_end(status.rank)
        self._stragglers.note_exit()
        self._server.rank_ended(status.rank, reason)
        if self._servers is not None:
            self._servers.rank_ended(status.rank, reason)

    def _note_arrival(self, event: RankEvent) -> None:
        if event.kind == "can_stop":
            self._can_stop.add(event.rank)
        if event.kind == "initialised" and self._capacity is not None:
            self._capacity.note_initialised(event.rank)
        if event.kind == "arrived" and event.generation <= 1:
            self._progress.begin()
            self._progress.note(event.rank)

    def _running_ranks(self) -> list[int]:
        return [rank.rank for rank in self._ranks if not rank.exit_status]

    def running(self) -> list[int]:
        return [process.rank for process in self._processes if not process.exit_status]

    def count(self) -> str:
        running = self.running()
        single, several = ("rank", "ranks") if self._servers is None else ("process", "processes")
        return f"1 {single}" if len(running) == 1 else f"{len(running)} {several}"

    def remotes(self) -> Sequence[RemoteHost]:
        return self._hosts

    def stop(self, code: int, text: str, number: int) -> None:
        if self._failure is not None:
            return
        if code == STOPPED and self._all_can_stop():
            kills = "(SIGTERM again kills them at once)"
            self.display.say(f"terminated (SIGTERM): {self.count()} may save and end {kills}")
            self._end(JobFailure(STOPPED, event=TERMINATED), ASK_TO_STOP, STOP_SECONDS)
            return
        events = {128 + signal.SIGINT: INTERRUPTED, 128 + signal.SIGTERM: TERMINATED}
        self._end(JobFailure(code, text, event=events.get(code, "failed")), number)

    def _all_can_stop(self) -> bool:
        """Returns whether all running ranks call `hvd.should_stop()`."""
        return bool(self._can_stop) and self._can_stop.issuperset(self._running_ranks())

    def _end(self, failure: JobFailure, number: int, seconds: float = KILL_SECONDS) -> None:
        """Sends all ranks signal `number`; kills the ranks that remain after so many seconds."""
        self._failure = failure
        self._decide_at = None
        self.kill_at = time.monotonic() + seconds
        self.ask_to_end(number)

    def signal(self, number: int) -> None:
        self._analyzer.note_signal(number)
        for process in self._processes:
            process.signal(number)

    def _show_result(self, summary: Sequence[str]) -> None:
        failure = self._failure
        reason, rank = "", None if failure is None else failure.rank
        if rank is not None:
            status = self._processes[rank].exit_status
            died = status is not None and status.died
            reason = self.show_error_of(rank, rank, self._analyzer.name(rank), died)
        for line in summary:
            self.display.say(line)
        notices = [self._analyzer.notice, self._servers.notice if self._servers is not None else ""]
        for notice in filter(None, notices if failure is None and self.settings.service is None else []):
            self.display.say(notice)
        text, culprit = ("", None) if failure is None else (failure.text, failure.culprit)
        self.show_last(text, reason, failure is not None, culprit)


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


# ---- Reports ranks that still run after the others have ended normally: one may be stopped -------------


FIRST_SECONDS = 30.0
_FACTOR = 10  # later reports are rare: the last rank may have hours of work of its own


class Stragglers:
    """Reports ranks that still run long after another rank has ended. `say` receives the line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since = 0.0
        self._pause = FIRST_SECONDS
        self.due: float | None = None  # when the next report is due (time.monotonic())

    def note_exit(self) -> None:
        """Records that a rank has ended normally."""
        self._since = time.monotonic()
        self._pause = FIRST_SECONDS
        self.due = self._since + self._pause

    def end(self) -> None:
        """Stops reporting: the job has failed, or all ranks have ended."""
        self.due = None

    def poll(self, now: float, running: Sequence[int]) -> None:
        """Reports the running ranks if a report is due."""
        if self.due is None or now < self.due:
            return
        if not running:  # servers of tables have not ended yet
            self.end()
            return
        runs = "runs" if len(running) == 1 else "run"
        self._say(f"{name_ranks(running)} still {runs}; the others ended {now - self._since:.0f} s ago")
        self._pause *= _FACTOR
        self.due = self._since + self._pause


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
