"""An elastic job of hvdrun: the driver carries out the arbiter's orders, and the main loop calls it."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sirtaki.bindings.bootstrap.job import RendezvousError
from sirtaki.runner.cli.command import runs_python
from sirtaki.runner.elastic.arbiter.model import Finish, Phase, Slot, Status
from sirtaki.runner.elastic.discovery import Discovery
from sirtaki.runner.elastic.driver import Driver, WorkerEnd
from sirtaki.runner.elastic.other_hosts import OtherHosts
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.elastic.processes import Processes
from sirtaki.runner.elastic.settings import ElasticSettings, slots_of
from sirtaki.runner.elastic.spares.job_spares import JobSpares, RemoteSpares
from sirtaki.runner.elastic.spares.spare_command import check_spare_command
from sirtaki.runner.elastic.spares.spare_process import SpareProcess
from sirtaki.runner.elastic.summary import describe_separate_runs
from sirtaki.runner.hosts.lease import HostLease, lease_clock
from sirtaki.runner.hosts.remote import RemoteHost
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import is_own_host
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
        from sirtaki.bindings.config import Config

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
