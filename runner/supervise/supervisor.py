"""The main loop of hvdrun: handles ranks, output, signals and the rendezvous until all ranks have ended."""

from __future__ import annotations

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sirtaki.runner.launch.capacity import Capacity
from sirtaki.runner.launch.process import Rank
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.observe.endpoints import Endpoints
from sirtaki.runner.rendezvous.job import FIRST_SERVER, name_of, name_ranks
from sirtaki.runner.rendezvous.messages import RankEvent, describe
from sirtaki.runner.rendezvous.server.rendezvous_server import RendezvousServer
from sirtaki.runner.rendezvous.termination import ASK_TO_STOP, STOPPED
from sirtaki.runner.supervise.display import Display
from sirtaki.runner.supervise.failure_analysis import ExitStatus, FailureAnalyzer, JobFailure
from sirtaki.runner.supervise.post_mortem import PostMortem
from sirtaki.runner.supervise.progress import Progress
from sirtaki.runner.supervise.signals import PASSED_ON, WakeupPipe, stop_this_process

if TYPE_CHECKING:
    from sirtaki.runner.function.service import FunctionService
    from sirtaki.runner.hosts.remote import RemoteHost
    from sirtaki.runner.launch.servers import Servers

ANALYSIS_SECONDS = 0.5  # after the first failure, so that the rank that caused it can be identified
REPORT_POLL_SECONDS = 0.01  # no event announces that a rank has written its report
DRAIN_SECONDS = 1.0  # for the last reports of ranks to arrive when all have ended
KILL_SECONDS = 5.0  # between the signal that asks the ranks to end and SIGKILL
STOP_SECONDS = 600.0  # the same for ranks that save first, as hvd.should_stop() tells them
RESULT_SECONDS = 1.0  # for the result to be read after a signal that comes when all ranks have ended
INTERRUPTED, TERMINATED = "was interrupted", "was terminated"  # events of a `JobFailure`
READER_GONE = 141  # a shell's exit code for a program killed by SIGPIPE


class Patience:
    """The user's patience after all ranks have ended.

    The first signal ends the wait for the ranks' output, the second signal the wait for hvdrun's result.
    """

    def __init__(self) -> None:
        self.has_ended = False  # the wait for output
        self.due: float | None = None  # when to wait for the result no longer (time.monotonic())
        self._skips_result = False

    def note_signal(self) -> None:
        self._skips_result = self.has_ended
        self.has_ended = True

    def is_over(self) -> bool:
        """Returns whether to wait no longer for the reader of the result, which is complete."""
        if self.has_ended and self.due is None:
            self.due = time.monotonic() + RESULT_SECONDS
        return self._skips_result or (self.due is not None and time.monotonic() >= self.due)


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
class Supervisor:
    """Supervises a job from the start of its ranks to its end."""

    ranks: Sequence[Rank]
    hosts: Sequence[RemoteHost]  # the hosts other than this one
    display: Display
    selector: selectors.BaseSelector
    analyzer: FailureAnalyzer
    server: RendezvousServer
    post_mortem: PostMortem
    progress: Progress
    service: FunctionService | None  # receives the failure instead of the user
    endpoints: Endpoints
    servers: Servers | None = None  # beside the ranks

    def __post_init__(self) -> None:
        self._processes = [*self.ranks, *(self.servers.processes if self.servers is not None else [])]
        self._stragglers = Stragglers(self.display.say)
        self._failure: JobFailure | None = None  # set once it is certain that the job has failed
        self._can_stop: set[int] = set()  # ranks that call hvd.should_stop()
        self._stopped: list[int] = []  # ranks that have ended because of that
        self._decide_at: float | None = None
        self._kill_at: float | None = None
        self._drained_at: float | None = None  # when to wait no longer for the last reports
        self._capacity: Capacity | None = None  # for the ranks of this host, while they start
        self._patience = Patience()

    def watch_memory(self, capacity: Capacity, seconds: float) -> None:
        """Aborts the job if its start uses up this host's memory. Must be called before `run`."""
        self._capacity = capacity
        capacity.watch(seconds)

    def run(self, wakeup: WakeupPipe, mailbox: Mailbox, reaper: Reaper) -> int:
        """Runs the loop; returns hvdrun's exit code when all descendants have ended and all is shown."""
        self.selector.register(
            wakeup, selectors.EVENT_READ, lambda: self._handle_wakeup(wakeup, mailbox, reaper)
        )
        wakeup.unblock_signals()
        self._handle_wakeup(wakeup, mailbox, reaper)
        self._run_until(lambda: all(process.exit_status for process in self._processes))
        self._drain(wakeup)
        self.server.close()
        if self.servers is not None:
            self.servers.close()
        self._conclude(mailbox)
        self._finish_hosts()
        for process in self._processes:
            process.reap()
        failed = self._failure is not None and self.analyzer.failed
        summary = self.post_mortem.lines(self._failure.event if self._failure and failed else "")
        reaper.release()
        self._run_until(lambda: reaper.ended() or self._patience.has_ended)
        for host in self.hosts:
            host.close()
        self.display.close_streams()
        self.display.begin_result(drops_output=self._patience.has_ended)
        self._show_result(summary)
        self._run_until(lambda: self.display.all_shown or self._patience.is_over())
        return self._failure.exit_code if self._failure else 0

    def _drain(self, wakeup: WakeupPipe) -> None:
        """Waits for reports that ranks sent before they ended.

        The reports of another host may arrive later than the news of the ranks' ends.
        """
        found: list[Sequence[int]] = []

        def note(ranks: Sequence[int]) -> None:
            found.append(ranks)
            wakeup.wake()

        lost = [rank.rank for rank in self.ranks if rank.exit_status and rank.exit_status.lost]
        self.server.drain(DRAIN_SECONDS, note, lost)
        deadline = self._drained_at = time.monotonic() + 2 * DRAIN_SECONDS  # even if its thread has ended
        self._run_until(lambda: bool(found) or self._patience.has_ended or time.monotonic() >= deadline)
        self._drained_at = None
        if missing := [rank for ranks in found for rank in ranks]:
            self.display.say(
                f"the last reports of {name_ranks(missing)} may be missing: the agent of their host has not "
                f"passed them on within {DRAIN_SECONDS:g} s"
            )

    def _conclude(self, mailbox: Mailbox) -> None:
        for event in mailbox.drain():
            self.analyzer.note_event(event)
        if self._failure is None and self.analyzer.failed:
            self._failure = self._analyze()
        if self._failure is None and self._stopped:
            ended = f"{name_ranks(sorted(self._stopped))} ended with exit code {STOPPED}"
            self._failure = JobFailure(STOPPED, f"stopped early, by hvd.should_stop(): {ended}")
        if self._failure is not None:
            self._failure = self.analyzer.with_late_reason(self._failure)
        self._decide_at = self._kill_at = None
        self.endpoints.release()
        self.progress.end()
        self._stragglers.end()

    def _finish_hosts(self) -> None:
        """Orders the agents to send their ranks' remaining files, and to end."""
        for host in self.hosts:
            host.finish()
        self._run_until(lambda: all(host.ended for host in self.hosts) or self._patience.has_ended)
        for host in self.hosts:
            if not (host.done or host.lost or self._patience.has_ended):
                self.display.say(f"the last output of ranks on {host.name} may be missing: {host.failure}")

    def _run_until(self, over: Callable[[], bool]) -> None:
        while not over():
            self.display.balance()
            for key, _ in self.selector.select(self._time_to_next_deadline()):
                key.data()
            for host in self.hosts:
                host.poll()
            if error := self.display.reader_error:
                self._handle_reader_error(error)
            self._handle_deadlines()

    def _all_is_known(self) -> bool:
        """Returns whether the culprit is known, and all survivors have written what they were doing."""
        return self.analyzer.conclusive and self.post_mortem.has_reports_of(self.analyzer.survivors)

    def _analyze(self) -> JobFailure:
        for rank, report in self.post_mortem.read_reports().items():
            self.analyzer.note_report(rank, report)
        return self.analyzer.failure()

    def _time_to_next_deadline(self) -> float | None:
        candidates = [
            self._decide_at if self._drained_at is None else None,
            self._kill_at,
            self._drained_at,
            self.progress.due,
            self._stragglers.due,
            self._patience.due,
        ]
        candidates += [host.deadline for host in self.hosts]
        candidates += [self._capacity.due] if self._capacity is not None else []
        candidates += [self.servers.end_due] if self.servers is not None and self._failure is None else []
        deadlines = [moment for moment in candidates if moment is not None]
        if self._decide_at is not None and self._drained_at is None and self.analyzer.conclusive:
            deadlines.append(time.monotonic() + REPORT_POLL_SECONDS)
        return max(min(deadlines) - time.monotonic(), 0) if deadlines else None

    def _handle_deadlines(self) -> None:
        now = time.monotonic()
        due = self._decide_at if self._drained_at is None else None  # after the last reports more is known
        if due is not None and (due <= now or self._all_is_known()):
            self._end(self._analyze(), signal.SIGTERM)
        if self._kill_at is not None and self._kill_at <= now:
            self._kill()
        self.progress.poll(now)
        self._stragglers.poll(now, self._running())
        if self._capacity is not None and self._failure is None and (shortage := self._capacity.poll(now)):
            self._end(JobFailure(1, shortage), signal.SIGTERM)
            self._kill()
        if self.servers is not None and self._failure is None and (overdue := self.servers.overdue(now)):
            self._end(JobFailure(1, overdue), signal.SIGTERM)

    def _handle_wakeup(self, wakeup: WakeupPipe, mailbox: Mailbox, reaper: Reaper) -> None:
        numbers = wakeup.read()
        if reaper.replace_if_killed():
            self.display.say("the process that cleans up after this job was killed; another one replaces it")
        self.endpoints.check()
        for event in mailbox.drain():
            show = self.display.say if event.kind == "refused" else self.display.detail
            show(f"the rendezvous reports that {describe(event)}")
            self.analyzer.note_event(event)
            self._note_arrival(event)
        for process in self._processes:
            if status := process.check():
                self._note_exit(status)
        if self.servers is not None and not self._running():
            self.servers.end()
        if self.analyzer.failed and self._failure is None and self._decide_at is None:
            self._decide_at = time.monotonic() + ANALYSIS_SECONDS
            self.progress.end()
            self._stragglers.end()
            for host in self.hosts:
                host.collect()
        for number in numbers:
            self._handle_signal(number)

    def _note_exit(self, status: ExitStatus) -> None:
        if status.code == STOPPED and status.rank in self._can_stop:
            self._stopped.append(status.rank)
            status = replace(status, code=0)  # no failure, on which the ranks that still save would be ended
        self.analyzer.note_exit(status)
        self.display.detail(f"{name_of(status.rank)} has ended with exit code {status.exit_code}")
        if status.failed or status.rank >= FIRST_SERVER:
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

    def _running(self) -> list[int]:
        return [rank.rank for rank in self.ranks if not rank.exit_status]

    def _handle_signal(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self._handle_termination(number)
        elif number == signal.SIGTSTP:
            self._signal_ranks(number)
            self._note_pause(number)
            for remote in self.hosts:
                remote.flush()
            stop_this_process()
            for remote in self.hosts:
                remote.forgive_silence()
        elif number == signal.SIGCONT or number in PASSED_ON:
            self._signal_ranks(number)
            if number == signal.SIGCONT:
                self._note_pause(number)

    def _note_pause(self, number: int) -> None:
        """Pauses or resumes the leases of all agents, also of agents that have no running rank left."""
        for remote in self.hosts:
            remote.note_signal(number)

    def _handle_termination(self, number: int) -> None:
        running = [process.rank for process in self._processes if not process.exit_status]
        if not running:
            self._patience.note_signal()
            self.display.drop()
        elif self._failure is not None:
            self._kill()
        elif number == signal.SIGTERM and self._can_stop.issuperset(self._running()):
            kills = "(SIGTERM again kills them at once)"
            self.display.say(f"terminated (SIGTERM): {_count(running)} may save and end {kills}")
            self._end(JobFailure(STOPPED, event=TERMINATED), ASK_TO_STOP, STOP_SECONDS)
        elif number == signal.SIGTERM:
            self._end(
                JobFailure(128 + number, f"terminated (SIGTERM): ending {_count(running)}", event=TERMINATED),
                number,
            )
        else:
            self.display.say(f"interrupted: ending {_count(running)} (Ctrl-C again kills them at once)")
            self.display.mute_errors_except(running[0])
            self._end(JobFailure(128 + number, event=INTERRUPTED), number)

    def _handle_reader_error(self, error: OSError) -> None:
        if self._failure is None:
            is_pipe_closed = isinstance(error, BrokenPipeError)
            text = "" if is_pipe_closed else f"cannot write to standard output: {error.strerror}"
            self._end(JobFailure(READER_GONE if is_pipe_closed else 1, text), signal.SIGTERM)

    def _end(self, failure: JobFailure, number: int, seconds: float = KILL_SECONDS) -> None:
        """Sends all ranks signal `number`; kills the ranks that remain after so many seconds."""
        self._failure = failure
        self._decide_at = None
        self._kill_at = time.monotonic() + seconds
        self._signal_ranks(number)
        self._signal_ranks(signal.SIGCONT)  # a stopped process does not handle signals

    def _kill(self) -> None:
        self._kill_at = None
        self._signal_ranks(signal.SIGKILL)

    def _signal_ranks(self, number: int) -> None:
        self.analyzer.note_signal(number)
        for process in self._processes:
            process.signal(number)

    def _show_result(self, summary: Sequence[str]) -> None:
        failure, service = self._failure, self.service
        reason, rank = "", None if failure is None else failure.rank
        explains = service is not None and service.has_outcome(rank)
        if rank is not None and not explains:
            status = next((process.exit_status for process in self._processes if process.rank == rank), None)
            reason = self.display.show_error_of(rank, died=status is not None and status.died)
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


def _count(running: Sequence[int]) -> str:
    single, several = ("process", "processes") if max(running) >= FIRST_SERVER else ("rank", "ranks")
    return f"1 {single}" if len(running) == 1 else f"{len(running)} {several}"


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
        if self.due is None or now < self.due or not running:
            return
        runs = "runs" if len(running) == 1 else "run"
        self._say(f"{name_ranks(running)} still {runs}; the others ended {now - self._since:.0f} s ago")
        self._pause *= _FACTOR
        self.due = self._since + self._pause
