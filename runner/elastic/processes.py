"""The processes of an elastic job's workers, on this host and on other hosts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from sirtaki.bindings.bootstrap.elastic.loaded_modules import SPARES
from sirtaki.bindings.bootstrap.job import ARBITER, WORKER, Job, RendezvousError
from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.elastic.arbiter.model import Slot
from sirtaki.runner.elastic.driver import CannotStart
from sirtaki.runner.elastic.other_hosts import OtherHosts
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.elastic.spares.host_spares import SpareNews
from sirtaki.runner.elastic.spares.job_spares import JobSpares
from sirtaki.runner.hosts.host_connection import Connection, with_slot_counts
from sirtaki.runner.hosts.lease import HostLease, lease_clock
from sirtaki.runner.hosts.remote import RemoteHost, RemoteJob
from sirtaki.runner.hosts.remote_rank import RemoteRank
from sirtaki.runner.launch.capacity import count_gpus, usable_cores
from sirtaki.runner.launch.environment import RankEnvironment, thread_counts
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import Host, is_own_host
from sirtaki.runner.launch.job import Settings, start_values
from sirtaki.runner.launch.job_folder import JobFolder
from sirtaki.runner.launch.process import REPORTS, Rank, RankProcess, describe_start_failure
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.supervise.display import Display
from sirtaki.runner.supervise.failure_analysis import ExitStatus
from sirtaki.runner.supervise.signals import WakeupPipe

_LAST_MESSAGE_SECONDS = 5.0  # for the last message of a worker, at most; elsewhere it may come after the end


@dataclass
class _Ended:
    """The end of a worker's process that the arbiter does not know yet."""

    status: ExitStatus
    since: float  # when it was noticed, or a silent host was last heard of (time.monotonic())
    until: float  # when it is told at the latest


@dataclass
class Processes:
    """The processes, by the numbers of their workers.

    Each slot has a lane: the number under which its output is shown, and by which agents know it.

    Attributes:
        settings, job, folder: those of the job; `job` is its name.
        size: the number of ranks with which it starts.
        spares: processes that take the places of lost workers, on the same hosts.
        hosts: the connections to other hosts.
    """

    settings: Settings
    job: str
    folder: JobFolder
    size: int
    post: Post
    display: Display
    reaper: Reaper
    spares: JobSpares
    hosts: OtherHosts
    running: dict[int, Slot] = field(default_factory=dict)
    _lanes: dict[Slot, int] = field(default_factory=dict)
    _all: dict[int, Rank] = field(default_factory=dict)
    _ended: dict[int, _Ended] = field(default_factory=dict)
    _hosts: dict[int, RemoteHost] = field(default_factory=dict)  # of workers elsewhere

    def know(self, slots: Sequence[Slot]) -> None:
        """Prepares for the output of these slots. Raises LaunchError if it cannot be kept."""
        for slot in slots:
            if slot not in self._lanes:
                lane = self._lanes[slot] = len(self._lanes)
                label = str(slot.index) if is_own_host(slot.host) else str(slot)
                self.display.add(lane, label, self.settings.output_folder, max(len(slots), lane + 1))

    def start(self, worker: int, slot: Slot) -> None:
        """Starts a worker. Raises CannotStart."""
        if is_own_host(slot.host):
            self._start_here(worker, slot)
            self.post.answer()  # the first of many workers must not wait until the last one is started
        elif host := self.hosts.ready(slot.host):
            self._start_there(worker, slot, host)
        else:
            raise CannotStart(f"{slot.host} was lost")
        self.running[worker] = slot

    def kill(self, worker: int) -> None:
        """Kills a worker; nothing happens if it has ended."""
        self.signal(signal.SIGKILL, worker)

    def environment(self, worker: int, slot: Slot) -> Mapping[str, str]:
        """Returns the environment of a worker on this host."""
        settings = self.settings
        slots_here = sum(is_own_host(lane.host) for lane in self._lanes)
        threads = thread_counts(min(self.size, slots_here), usable_cores(), os.environ)
        additions = {**threads, **settings.additions}
        additions.setdefault(REPORTS, os.environ.get(REPORTS, str(self.folder.path)))
        additions |= {WORKER: str(worker), "HOROVOD_ELASTIC": "1", ARBITER: self.post.address}
        if self.spares.wanted:
            additions[SPARES] = "1"
        environment = RankEnvironment(
            self.job, self.post.address, self.folder.key_file, settings.start_timeout, additions
        )
        return environment.of(self._placement(slot), os.environ)

    def values_elsewhere(self, worker: int, slot: Slot) -> dict[str, Any]:
        """Returns from which values an agent makes the environment of a worker on its host."""
        own = {WORKER: str(worker), "HOROVOD_ELASTIC": "1", ARBITER: self.post.address_for_others()}
        if self.spares.wanted:
            own[SPARES] = "1"
        return {"placement": astuple(self._placement(slot)), "additions": own}

    def ended(self, now: float) -> Iterator[tuple[int, ExitStatus, float]]:
        """Yields the workers that have ended, each after its last message if that can be known.

        The third value is the moment since when a worker has been known to be gone.
        """
        ended_here = []
        for worker in list(self.running):
            if worker not in self._ended and (status := self._all[worker].check()):
                silent_since = self._hosts[worker].silent_since if worker in self._hosts else None
                since = now if silent_since is None else silent_since
                self._ended[worker] = _Ended(status, since, now + self._patience(worker, status))
                if worker not in self._hosts:
                    ended_here.append(worker)
        if ended_here:  # they may have sent messages after the connections were served
            self.post.answer(_LAST_MESSAGE_SECONDS, ended_here)
        for worker, end in list(self._ended.items()):
            if end.until <= now or not self.post.is_connected(worker):
                del self._ended[worker]
                del self.running[worker]
                yield worker, end.status, end.since

    def died(self, worker: int) -> bool:
        """Returns whether a worker was killed or lost, instead of ending by itself."""
        status = self._all[worker].exit_status
        return status is not None and status.died

    def clear(self, worker: int) -> None:
        """Ends what a worker that was lost, or has failed, has left behind: it may hold a GPU."""
        self._all[worker].clear()

    @property
    def awaits_messages(self) -> bool:
        """Returns whether an end is kept back."""
        return bool(self._ended)

    @property
    def due(self) -> float | None:
        """Returns when to call `ended`, whatever happens (time.monotonic())."""
        return min((end.until for end in self._ended.values()), default=None)

    def signal(self, number: int, worker: int | None = None) -> None:
        """Sends a signal to a worker, or to all that run."""
        for item in self.running if worker is None else [worker]:
            if item in self.running:
                self._all[item].signal(number)

    def lane(self, worker: int) -> int | None:
        """Returns the lane of a worker; None if it was never started."""
        process = self._all.get(worker)
        return process.rank if process is not None else None

    def note_pid(self, lane: int, pid: int) -> None:
        """Records the process that runs in a lane."""
        slot = next(slot for slot, number in self._lanes.items() if number == lane)
        self.display.detail(f"the worker in slot {slot} is pid {pid}")

    def reap(self) -> None:
        for process in self._all.values():
            process.reap()

    def _patience(self, worker: int, status: ExitStatus) -> float:
        """Returns for how many seconds an end may be kept back, while the worker seems to be connected."""
        if worker not in self._hosts:
            return 0.0  # its messages have been read, for all were there when it ended
        return self._hosts[worker].lease_left if status.lost else _LAST_MESSAGE_SECONDS

    def _start_here(self, worker: int, slot: Slot) -> None:
        lane, environment = self._lanes[slot], self.environment(worker, slot)
        command = self.settings.command
        try:
            self.folder.restore_key()
            process = self.spares.take(slot.host, lane, environment, time.monotonic())
            is_new = process is None
            process = process or RankProcess(lane, command, environment, self.reaper)
        except OSError as error:
            raise CannotStart(describe_start_failure(f"rank {lane}", command, error)) from None
        if is_new:
            self.display.read_rank(lane, process.stdout, process.stderr)
        self._all[worker] = process
        self.note_pid(lane, process.pid)

    def _start_there(self, worker: int, slot: Slot, host: RemoteHost) -> None:
        rank, values = RemoteRank(self._lanes[slot], host), self.values_elsewhere(worker, slot)
        if (spare := self.spares.choose(slot.host, time.monotonic())) is not None:
            values["spare"] = spare
        host.launch(rank, values)
        self._all[worker], self._hosts[worker] = rank, host

    def _placement(self, slot: Slot) -> RankPlacement:
        """Returns a worker's place until a world exists."""
        rank = min(self._lanes[slot], self.size - 1)
        return RankPlacement(rank, self.size, slot.index, self.size, 0, 1)


# ---- Reaches the other hosts of an elastic job, and prepares their agents for workers ------------------


@dataclass(frozen=True)
class HostStart:
    """The way to other hosts.

    `on_start` is called with a worker's lane and its pid there, `spares` for the spares of all hosts.
    """

    settings: Settings
    job: Job
    post: Post
    connection: Connection
    wakeup: WakeupPipe
    reaper: Reaper
    on_start: Callable[[int, int], None]
    spares: SpareNews
    states: Path  # the folder of the states of this host's workers

    def connect(self, hosts: Sequence[Host]) -> tuple[list[RemoteHost], list[Host]]:
        """Reaches all hosts, and returns the connections, and the hosts with their numbers of slots.

        Raises LaunchError if one cannot take part.
        """
        program = self.settings.command[0]
        remotes = self.connection.connect(hosts, program, self.wakeup, self.reaper)
        if all(host.slots for host in hosts):
            return remotes, list(hosts)
        return remotes, with_slot_counts(hosts, remotes, count_gpus())

    def begin(self, name: str) -> RemoteHost:
        """Queries a host, and returns at once. Raises LaunchError."""
        return self.connection.begin(name, self.settings.command[0], self.reaper)

    def prepare(self, remote: RemoteHost, slots: int) -> None:
        """Prepares a host that has answered for this number of workers. Raises LaunchError."""
        try:
            address = self.post.address_for_others()
        except RendezvousError as error:
            raise LaunchError(str(error), 1) from None
        lease = self._lease_seconds()
        values = start_values(self.settings, self.job, address)
        values |= {"placements": [], "slots": slots, "lease": lease}
        timeline, hosts_lease = self.settings.timeline, HostLease(lease, lease_clock())
        wake = self.wakeup.wake
        job = RemoteJob({}, None, self.on_start, wake, timeline, hosts_lease, self.spares, self.states)
        remote.start(values, job)

    def _lease_seconds(self) -> float:
        """Returns the length of a lease: the time for which ranks let each other's machines be silent."""
        from sirtaki.bindings import variables  # opens the core
        from sirtaki.bindings.config import Config

        values = variables.values({**os.environ, **self.settings.additions})
        return float(Config(values).get("heartbeat"))
