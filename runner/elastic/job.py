"""An elastic job of hvdrun: the driver carries out the arbiter's orders, and the main loop calls it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from sirtaki.bindings.bootstrap.elastic.loaded_modules import SPARES
from sirtaki.bindings.bootstrap.job import ARBITER, WORKER, RendezvousError
from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.cli.command import runs_python
from sirtaki.runner.elastic.arbiter.model import Finish, Phase, Slot, Status, describe_separate_runs
from sirtaki.runner.elastic.discovery import Discovery
from sirtaki.runner.elastic.driver import Driver, WorkerEnd
from sirtaki.runner.elastic.other_hosts import OtherHosts
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.elastic.settings import ElasticSettings, slots_of
from sirtaki.runner.elastic.spares.host_spares import SpareProcess
from sirtaki.runner.elastic.spares.job_spares import JobSpares, RemoteSpares
from sirtaki.runner.elastic.spares.spare_command import check_spare_command
from sirtaki.runner.hosts.lease import HostLease, lease_clock
from sirtaki.runner.hosts.remote import RemoteHost, RemoteRank
from sirtaki.runner.launch.capacity import usable_cores
from sirtaki.runner.launch.environment import thread_counts
from sirtaki.runner.launch.errors import CannotStart, LaunchError
from sirtaki.runner.launch.hosts import is_own_host
from sirtaki.runner.launch.process import ProcessStart, Rank
from sirtaki.runner.launch.starter import JobStarter, Settings, with_starter
from sirtaki.runner.supervise.failure_analysis import (
    ExitStatus,
    describe_threads,
    finished_peers,
    killed_by,
)
from sirtaki.runner.supervise.main_loop import KILL_SECONDS, MainLoop, Pollable

_PER_WORKER = 4  # descriptors: the ends of two pipes, and the connections to the arbiter and to a generation
_NO_WORKER = -1  # the number of a spare, which has none
_NO_TIMELINE = "no rank has begun to train, or all files were lost with their hosts"


class ElasticJob(MainLoop):
    """An elastic job; runs in the main thread only, so that workers can be forked."""

    def __init__(self, starter: JobStarter, elastic: ElasticSettings) -> None:
        super().__init__(starter)
        self._elastic = elastic
        display, folder = starter.display, starter.folder.path
        self.endpoints.serve_metrics(self.settings.metrics)
        self.endpoints.serve_page(self.settings.dashboard)
        self._post = Post(
            starter.job,
            str(folder),
            self.settings.interfaces,
            lambda *message: self._driver.receive(*message),
            display.say,
            starter.on_call,
        )
        self._spares = JobSpares(
            elastic.spares, self._start_spare, self._spares_of, folder, self.selector, display
        )
        self._hosts = OtherHosts(
            starter.connection.begin, self._prepare_host, display.say, elastic.rules.cooldown
        )
        self._processes = Processes(starter, elastic.rules.start, self._post, self._spares, self._hosts)
        self._discovery = Discovery(elastic.script, elastic.slots_per_host, display.say)
        self._slots: Sequence[Slot] = ()
        self._driver = Driver(
            elastic.rules, self._post, self._processes, display.say, self._end, self._spares
        )
        self._end_signal: int = signal.SIGTERM  # for all workers, if the job fails
        self._signal_to_send: int | None = None
        self._has_concluded = False  # all workers have ended, and their messages have been handled

    def run(self) -> int:
        """Runs the job to its end; returns hvdrun's exit code. Raises LaunchError if it cannot start."""
        self.starter.say_notices()
        self.starter.allow_descriptors(self._elastic.rules.maximum, _PER_WORKER)
        slots = self._find_slots()
        if own := sum(is_own_host(slot.host) for slot in slots):
            self.starter.capacity(min(own, self._elastic.rules.start))
        if self.settings.timeline is not None:
            self.settings.timeline.prepare()
        self.begin()
        self._set_slots(slots)
        self.run_until(self.has_ended)
        return self._end_job()

    def _find_slots(self) -> Sequence[Slot]:
        """Returns the slots with which the job begins. Raises LaunchError if there are too few.

        Hosts that the user has named have to be there; those of a script may come later.
        """
        elastic = self._elastic
        if elastic.script:
            slots = self._discovery.first()
            self._hosts.want(slots)
            return slots
        per_host = elastic.slots_per_host
        hosts = [replace(host, slots=host.slots or per_host) for host in elastic.hosts]
        remotes, hosts = self.starter.connection.connect(hosts)
        slots, start = slots_of(hosts), elastic.rules.start
        if len(slots) < start:
            raise LaunchError(f"{start} ranks need {start} slots, but there are {len(slots)}")
        self._hosts.adopt(remotes, slots)
        return slots

    def _prepare_host(self, remote: RemoteHost, slots: int) -> None:
        """Prepares a host that has answered for this number of workers. Raises LaunchError."""
        try:
            address = self._post.address_for_others()
        except RendezvousError as error:
            raise LaunchError(str(error), 1) from None
        seconds, on_start = self._lease_seconds(), self._processes.note_pid
        lease = HostLease(seconds, lease_clock())
        values = {"placements": [], "slots": slots, "lease": seconds}
        spares = self._spares
        self.starter.start_agent(remote, address, {}, on_start, values, lease=lease, spares=spares)

    def _lease_seconds(self) -> float:
        """Returns the length of a lease: the time for which ranks let each other's machines be silent."""
        from sirtaki.bindings import variables  # opens the core
        from sirtaki.bindings.library import Config

        values = variables.values({**os.environ, **self.settings.additions})
        return float(Config(values).get("heartbeat"))

    # ---- The loop --------------------------------------------------------------------------------------

    def advance(self) -> None:
        if self._has_concluded:
            for remote in self.remotes():
                remote.poll()
            return
        self._serve()
        now = time.monotonic()
        self._discover(now)
        if self._hosts.poll(now, self._processes.running):
            self._update_slots()
        self._driver.advance(now)
        self._serve()  # sends what the orders have queued
        # Messages may have begun or ended the training: it is the last thing before the loop waits.
        if self._spares.wanted:
            is_running = self._driver.arbiter.phase is Phase.RUNNING
            self._spares.advance(self._ranks_of_hosts(), is_running, time.monotonic())
        if self._signal_to_send is not None:
            self.ask_to_end(self._signal_to_send)
            self._signal_to_send = None

    def _serve(self) -> None:
        self._post.serve()
        if self._processes.awaits_messages:
            self._note_ends()

    def sources(self) -> Sequence[Pollable]:
        return () if self._has_concluded else self._post.servers()

    def moments(self) -> Sequence[float | None]:
        if self._has_concluded:
            return []
        parts = (self._driver, self._discovery, self._hosts, self._processes, self._spares, self._post)
        return [part.due for part in parts]

    def note_changes(self) -> None:
        if self._has_concluded:
            return
        self._spares.check()
        self._serve()  # a worker's last message precedes its end
        self._note_ends()

    def remotes(self) -> Sequence[RemoteHost]:
        return self._hosts.remotes()

    def running(self) -> Sequence[int]:
        return sorted(self._processes.lane(worker) or 0 for worker in self._processes.running)

    def has_ended(self) -> bool:
        return self._driver.is_over and not self._processes.running

    def signal(self, number: int) -> None:
        self._processes.signal(number)

    def stop(self, code: int, text: str, number: int) -> None:
        if self._has_concluded:
            return
        self._end_signal = number
        self._driver.stop(Finish(code, text))

    def _note_ends(self) -> None:
        # When the job ends, nothing depends on the last messages of a worker.
        until = time.monotonic() if self._driver.result is None else math.inf
        for worker, status, since in list(self._processes.ended(until)):
            number = signal.SIGKILL if status.lost else status.killed_by
            keeps_slot = self._hosts.takes_workers(self._driver.arbiter.workers[worker].slot)
            self._post.deliver()  # what has come while the end of another worker was handled
            # A member that ends with exit code 0 has not returned: another may take its place.
            is_member = self._driver.arbiter.workers[worker].status is Status.MEMBER
            if status.failed or (is_member and self._driver.result is None):
                self._processes.clear(worker)
            end = WorkerEnd(status.code, number, _describe(status), since, keeps_slot)
            self._driver.note_end(worker, end)

    def _discover(self, now: float) -> None:
        """Sets the slots from the discovery script's answers."""
        for slots in self._discovery.poll(now):
            try:
                self._set_slots(slots)
            except LaunchError as error:  # their output cannot be kept
                self.stop(1, str(error), signal.SIGTERM)

    def _set_slots(self, slots: Sequence[Slot]) -> None:
        self._processes.know(slots)
        self._hosts.want(slots)
        self._slots = slots
        self._update_slots()

    def _update_slots(self) -> None:
        usable = self._hosts.usable(self._slots, self._processes.running)
        self._driver.set_slots(usable)

    # ---- Spares ----------------------------------------------------------------------------------------

    def _ranks_of_hosts(self) -> dict[str, int]:
        """Returns the number of running workers by host, for all hosts on which workers can be started."""
        used = Counter(slot.host for slot in self._processes.running.values())
        return {slot.host: used[slot.host] for slot in self._slots if self._hosts.takes_workers(slot)}

    def _spares_of(self, host: str) -> RemoteSpares | None:
        """Returns the spares of another host; None if its agent is not there."""
        remote = self._hosts.ready(host)
        return None if remote is None else RemoteSpares(remote, self._values_of_spare)

    def _values_of_spare(self, host: str) -> dict[str, Any]:
        """Returns the values of the SPARE frame."""
        slot = next(slot for slot in self._slots if slot.host == host)
        values = self._processes.values_elsewhere(_NO_WORKER, slot)
        return {**values, "runs_script": self._elastic.spares_run_script}

    def _start_spare(self) -> SpareProcess:
        """Starts a spare on this host. Raises OSError and LaunchError."""
        slot = next(slot for slot in self._slots if is_own_host(slot.host))
        environment, command = self._processes.environment(_NO_WORKER, slot), self.settings.command
        folder, runs_script = self.starter.folder.path, self._elastic.spares_run_script
        return SpareProcess(command, environment, folder, runs_script, self.reaper)

    # ---- The end ---------------------------------------------------------------------------------------

    def _end(self, result: Finish) -> None:
        """Ends the job: asks all workers to end, and sets the time to kill workers that remain."""
        self.kill_at = time.monotonic() + KILL_SECONDS
        self._spares.end()
        if result.code:
            self._signal_to_send = self._end_signal  # after the message with the reason

    def _end_job(self) -> int:
        self._has_concluded, self.kill_at = True, None
        self.endpoints.release()
        self._discovery.close()
        self._hosts.finish()
        self.await_hosts()
        self._post.close()
        self._processes.reap()
        self._spares.reap()
        timeline = self.settings.timeline
        notices = [] if timeline is None else [timeline.merge(_NO_TIMELINE)]
        self.conclude(lambda: self._show_result(notices))
        return self._result.code

    @property
    def _result(self) -> Finish:
        return self._driver.result or Finish(0)

    def _show_result(self, notices: Sequence[str]) -> None:
        result, service = self._result, self.settings.service
        reason, culprit = "", result.culprit
        name = "" if culprit is None else self._driver.arbiter.workers[culprit].name
        if culprit is not None and (lane := self._processes.lane(culprit)) is not None:
            reason = self.show_error_of(culprit, lane, name, self._processes.died(culprit))
        for notice in filter(None, [self._driver.summary(), *notices, self._remark(result.code)]):
            self.display.say(notice)
        text = result.text
        if (peers := finished_peers(reason)) is not None:
            text, reason = peers.explain("had returned from the training function", name), ""
        if service is not None:
            service.note_ranks(self._driver.last_ranks())
        self.show_last(text, reason, result.code != 0, culprit)

    def _remark(self, code: int) -> str:
        """Returns a notice if a successful job had failed threads, or no worker was ever a rank; else ""."""
        arbiter = self._driver.arbiter
        if code or self.settings.service is not None:
            return ""
        if arbiter.generation:
            return describe_threads(self._post.failed_threads)
        is_python = runs_python(self.settings.command)
        return describe_separate_runs(len(arbiter.workers.all()), self._post.has_initialised, is_python)


def _describe(status: ExitStatus) -> str:
    """Describes the end of a worker's process."""
    if status.lost:
        return f"its host {status.host} was lost: {status.lost}"
    if status.killed_by:
        return killed_by(status.killed_by)
    return f"failed with exit code {status.code}" if status.code else "ended"


def run_elastic_job(settings: Settings, elastic: ElasticSettings) -> int:
    """Runs an elastic job to its end; returns hvdrun's exit code. Raises LaunchError if it cannot start."""
    if elastic.spares:
        check_spare_command(settings.command)
    return with_starter(settings, lambda starter: ElasticJob(starter, elastic).run())


# ---- The processes of the workers, on this host and on other hosts -------------------------------------


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
