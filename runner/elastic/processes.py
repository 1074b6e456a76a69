"""The processes of an elastic job's workers, on this host and on other hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from sirtaki.bindings.bootstrap.elastic.loaded_modules import SPARES
from sirtaki.bindings.bootstrap.job import ARBITER, WORKER
from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.elastic.arbiter.model import Slot
from sirtaki.runner.elastic.other_hosts import OtherHosts
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.elastic.spares.job_spares import JobSpares
from sirtaki.runner.hosts.remote import RemoteHost, RemoteRank
from sirtaki.runner.launch.capacity import usable_cores
from sirtaki.runner.launch.environment import thread_counts
from sirtaki.runner.launch.errors import CannotStart
from sirtaki.runner.launch.hosts import is_own_host
from sirtaki.runner.launch.process import ProcessStart, Rank
from sirtaki.runner.launch.starter import JobStarter
from sirtaki.runner.supervise.failure_analysis import ExitStatus

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
        size: the number of ranks with which the job starts.
        spares: processes that take the places of lost workers, on the same hosts.
        hosts: the connections to other hosts.
    """

    starter: JobStarter
    size: int
    post: Post
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
                folder = self.starter.settings.output_folder
                self.starter.display.add(lane, label, folder, max(len(slots), lane + 1))

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
        slots_here = sum(is_own_host(lane.host) for lane in self._lanes)
        threads = thread_counts(min(self.size, slots_here), usable_cores(), os.environ)
        address = self.post.address
        environment = self.starter.environment(address, threads, self._additions(worker, address))
        return environment.of(self._placement(slot), os.environ)

    def values_elsewhere(self, worker: int, slot: Slot) -> dict[str, Any]:
        """Returns from which values an agent makes the environment of a worker on its host."""
        additions = self._additions(worker, self.post.address_for_others())
        return {"placement": astuple(self._placement(slot)), "additions": additions}

    def _additions(self, worker: int, arbiter: str) -> dict[str, str]:
        """Returns the variables that only workers have; `arbiter` is the address of its rendezvous."""
        found = {WORKER: str(worker), "HOROVOD_ELASTIC": "1", ARBITER: arbiter}
        return found | ({SPARES: "1"} if self.spares.wanted else {})

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
        self.starter.display.detail(f"the worker in slot {slot} is pid {pid}")

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
        with contextlib.suppress(OSError):  # the spare will name what is missing
            self.starter.folder.restore_key()
        process = self.spares.take(slot.host, lane, environment, time.monotonic())
        if process is None:
            command = self.starter.settings.command
            process = self.starter.start_here(ProcessStart(lane, f"rank {lane}", command, environment))
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
