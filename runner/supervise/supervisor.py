"""A static job of hvdrun: its ranks, their rendezvous, and the verdict on a failure."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sirtaki.bindings.bootstrap.job import ASK_TO_STOP, STOPPED, name_ranks
from sirtaki.bindings.bootstrap.messages import RankEvent, describe
from sirtaki.bindings.bootstrap.server.rendezvous_server import RendezvousServer
from sirtaki.runner.launch.capacity import Capacity
from sirtaki.runner.launch.process import Rank
from sirtaki.runner.supervise.display import Progress
from sirtaki.runner.supervise.failure_analysis import ExitStatus, FailureAnalyzer, JobFailure
from sirtaki.runner.supervise.main_loop import KILL_SECONDS, MainLoop
from sirtaki.runner.supervise.post_mortem import PostMortem
from sirtaki.runner.supervise.signals import WakeupPipe

if TYPE_CHECKING:
    from sirtaki.runner.function.service import FunctionService
    from sirtaki.runner.hosts.remote import RemoteHost
    from sirtaki.runner.launch.servers import Servers

ANALYSIS_SECONDS = 0.5  # after the first failure, so that the rank that caused it can be identified
REPORT_POLL_SECONDS = 0.01  # no event announces that a rank has written its report
DRAIN_SECONDS = 1.0  # for the last reports of ranks to arrive when all have ended
STOP_SECONDS = 600.0  # for ranks that save before they end, as hvd.should_stop() tells them
INTERRUPTED, TERMINATED = "was interrupted", "was terminated"  # events of a `JobFailure`


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


@dataclass
class Supervisor(MainLoop):
    """Supervises a static job from the start of its ranks to its end."""

    processes: Sequence[Rank]  # the ranks, then the servers of tables, in the order of their numbers
    hosts: Sequence[RemoteHost]  # the hosts other than this one
    analyzer: FailureAnalyzer
    server: RendezvousServer
    post_mortem: PostMortem
    progress: Progress
    mailbox: Mailbox
    service: FunctionService | None  # receives the failure instead of the user
    servers: Servers | None = None

    def __post_init__(self) -> None:
        self._ranks = self.processes[: self.analyzer.size]
        self._stragglers = Stragglers(self.display.say)
        self._failure: JobFailure | None = None  # set once it is certain that the job has failed
        self._can_stop: set[int] = set()  # ranks that call hvd.should_stop()
        self._stopped: list[int] = []  # ranks that have ended because of that
        self._decide_at: float | None = None
        self._drained_at: float | None = None  # when to wait no longer for the last reports
        self._capacity: Capacity | None = None  # for the ranks of this host, while they start

    def watch_memory(self, capacity: Capacity, seconds: float) -> None:
        """Aborts the job if its start uses up this host's memory. Must be called before `run`."""
        self._capacity = capacity
        capacity.watch(seconds)

    def run(self) -> int:
        """Runs the loop; returns hvdrun's exit code when all descendants have ended and all is shown."""
        self.begin()
        self._handle_wakeup()
        self.run_until(lambda: all(process.exit_status for process in self.processes))
        self._drain()
        self.server.close()
        if self.servers is not None:
            self.servers.close()
        self._decide()
        self._finish_hosts()
        for process in self.processes:
            process.reap()
        failed = self._failure is not None and self.analyzer.failed
        summary = self.post_mortem.lines(self._failure.event if self._failure and failed else "")
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
        self.server.drain(DRAIN_SECONDS, note, lost)
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
        for event in self.mailbox.drain():
            self.analyzer.note_event(event)
        if self._failure is None and self.analyzer.failed:
            self._failure = self._analyze()
        if self._failure is None and self._stopped:
            ended = f"{name_ranks(sorted(self._stopped))} ended with exit code {STOPPED}"
            self._failure = JobFailure(STOPPED, f"stopped early, by hvd.should_stop(): {ended}")
        if self._failure is not None:
            self._failure = self.analyzer.with_late_reason(self._failure)
        self._decide_at = self.kill_at = None
        self.endpoints.release()
        self.progress.end()
        self._stragglers.end()

    def _finish_hosts(self) -> None:
        """Orders the agents to send their ranks' remaining files, and to end."""
        for host in self.hosts:
            host.finish()
        self.await_hosts()
        for host in self.hosts:
            if not (host.done or host.lost or self.patience.has_ended):
                self.display.say(f"the last output of ranks on {host.name} may be missing: {host.failure}")

    def _all_is_known(self) -> bool:
        """Returns whether the culprit is known, and all survivors have written what they were doing."""
        return self.analyzer.conclusive and self.post_mortem.has_reports_of(self.analyzer.survivors)

    def _analyze(self) -> JobFailure:
        for rank, report in self.post_mortem.read_reports().items():
            self.analyzer.note_report(rank, report)
        return self.analyzer.failure()

    def moments(self) -> Sequence[float | None]:
        moments = [self._drained_at, self.progress.due, self._stragglers.due]
        if self._drained_at is None:  # after the last reports more is known
            moments.append(self._decide_at)
            if self._decide_at is not None and self.analyzer.conclusive:
                moments.append(time.monotonic() + REPORT_POLL_SECONDS)
        moments += [self._capacity.due] if self._capacity is not None else []
        moments += [self.servers.end_due] if self.servers is not None and self._failure is None else []
        return moments

    def advance(self) -> None:
        for host in self.hosts:
            host.poll()
        now = time.monotonic()
        due = self._decide_at if self._drained_at is None else None
        if due is not None and (due <= now or self._all_is_known()):
            self._end(self._analyze(), signal.SIGTERM)
        self.progress.poll(now)
        self._stragglers.poll(now, self._running_ranks())
        if self._capacity is not None and self._failure is None and (shortage := self._capacity.poll(now)):
            self._end(JobFailure(1, shortage), signal.SIGTERM)
            self._kill()
        if (
            self.servers is not None
            and self._failure is None
            and (overdue := self.servers.overdue(now, map(self.analyzer.name, self.running())))
        ):
            self._end(JobFailure(1, overdue), signal.SIGTERM)

    def note_changes(self) -> None:
        for event in self.mailbox.drain():
            show = self.display.say if event.kind == "refused" else self.display.detail
            show(f"the rendezvous reports that {describe(event, self.analyzer.name)}")
            self.analyzer.note_event(event)
            self._note_arrival(event)
        for process in self.processes:
            if status := process.check():
                self._note_exit(status)
        if self.servers is not None and not self._running_ranks():
            self.servers.end()
        if self.analyzer.failed and self._failure is None and self._decide_at is None:
            self._decide_at = time.monotonic() + ANALYSIS_SECONDS
            self.progress.end()
            self._stragglers.end()
            for host in self.hosts:
                host.collect()

    def _note_exit(self, status: ExitStatus) -> None:
        if status.code == STOPPED and status.rank in self._can_stop:
            self._stopped.append(status.rank)
            status = replace(status, code=0)  # no failure, on which the ranks that still save would be ended
        self.analyzer.note_exit(status)
        self.display.detail(f"{self.analyzer.name(status.rank)} has ended with exit code {status.exit_code}")
        if status.failed:
            return
        reason = self.analyzer.describe_end(status.rank)
        self._stragglers.note_exit()
        self.server.rank_ended(status.rank, reason)
        if self.servers is not None:
            self.servers.rank_ended(status.rank, reason)

    def _note_arrival(self, event: RankEvent) -> None:
        if event.kind == "can_stop":
            self._can_stop.add(event.rank)
        if event.kind == "initialised" and self._capacity is not None:
            self._capacity.note_initialised(event.rank)
        if event.kind == "arrived" and event.generation <= 1:
            self.progress.begin()
            self.progress.note(event.rank)

    def _running_ranks(self) -> list[int]:
        return [rank.rank for rank in self._ranks if not rank.exit_status]

    def running(self) -> list[int]:
        return [process.rank for process in self.processes if not process.exit_status]

    def count(self) -> str:
        running = self.running()
        single, several = ("rank", "ranks") if self.servers is None else ("process", "processes")
        return f"1 {single}" if len(running) == 1 else f"{len(running)} {several}"

    def remotes(self) -> Sequence[RemoteHost]:
        return self.hosts

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
        self.signal(number)
        self.signal(signal.SIGCONT)  # a stopped process does not handle signals

    def signal(self, number: int) -> None:
        self.analyzer.note_signal(number)
        for process in self.processes:
            process.signal(number)

    def _show_result(self, summary: Sequence[str]) -> None:
        failure, service = self._failure, self.service
        reason, rank = "", None if failure is None else failure.rank
        explains = service is not None and service.has_outcome(rank)
        if rank is not None and not explains:
            status = self.processes[rank].exit_status
            died = status is not None and status.died
            reason = self.display.show_error_of(rank, self.analyzer.name(rank), died)
        for line in summary:
            self.display.say(line)
        notices = [self.analyzer.notice, self.servers.notice if self.servers is not None else ""]
        for notice in filter(None, notices if failure is None and service is None else []):
            self.display.say(notice)
        text = f"{failure.text}{reason and ': '}{reason}" if failure is not None and failure.text else ""
        if failure is not None and service is not None:
            service.note_failure(text, failure.culprit)
        elif text:
            self.display.say(text)


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
