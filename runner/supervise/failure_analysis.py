"""Finds the rank that caused a job to fail: its end explains the ends of the other ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sirtaki.bindings.bootstrap.job import name_ranks
from sirtaki.bindings.bootstrap.messages import RankEvent

# For a rank that hvdrun and another rank have lost although its process kept running.
_CONNECTIONS_CLOSED = (
    "all its connections were closed while it ran: has its program closed descriptors that it had not opened?"
)


@dataclass(frozen=True)
class ExitStatus:
    """The end of a process: its exit code, or the number of the signal that killed it (else 0).

    `rank` is its number: of a server of tables, that in their worlds, after the ranks. `host` is its host, if
    that is not hvdrun's; `lost` is the reason why its end is unknown.
    """

    rank: int
    code: int
    killed_by: int
    host: str = ""
    lost: str = ""

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.killed_by != 0 or self.lost != ""

    @property
    def died(self) -> bool:
        """Returns whether the process was killed or lost, instead of ending by itself."""
        return self.killed_by != 0 or self.lost != ""

    @property
    def exit_code(self) -> int:
        """Returns the exit code that a shell would report."""
        if self.lost:
            return 1
        return 128 + self.killed_by if self.killed_by else self.code


@dataclass(frozen=True)
class JobFailure:
    """The result of a failed job.

    `rank` is the rank to show the last lines of; None if no rank explains the failure or `text` already gives
    the reason. `culprit` is the rank that failed by an error of its own and so caused the failure; None if
    there is no such rank.
    """

    exit_code: int
    text: str = ""
    rank: int | None = None
    event: str = "failed"  # the verb of "the job …": it failed, was interrupted or was terminated
    culprit: int | None = None


class FailureAnalyzer:
    """Collects how ranks end and their reports to the rendezvous, and names the culprit of a failure.

    A job of `size` ranks may have servers of tables, whose numbers follow those of the ranks.
    """

    def __init__(
        self, size: int, start_timeout: float, runs_python: bool = True, uses_torch_variables: bool = False
    ) -> None:
        self.size = size
        self._start_timeout = start_timeout
        self._runs_python = runs_python
        self._uses_torch_variables = uses_torch_variables
        self._names: dict[int, str] = {}  # with the processes
        self._statuses: dict[int, ExitStatus] = {}  # in the order of the exits
        self._arrived: set[int] = set()  # ranks that have called init
        self._members: set[int] = set()  # ranks that have completed init, and have not reached shutdown
        self._abort: RankEvent | None = None  # the first one
        self._secondary: set[int] = set()  # ended because another rank failed, was lost or did not arrive
        self._reasons: dict[int, str] = {}  # the exceptions that ranks raised
        self._blamed: dict[int, str] = {}  # by blamed rank: the reason given by ranks that it made fail
        self._disconnected: set[int] = set()  # hvdrun lost their connections before they reported their end
        self._late: tuple[int, str] | None = None  # the rank that exceeded a deadline, and the error
        self._absent: RankEvent | None = None  # names the ranks that others have waited for in vain
        self._threads: dict[int, str] = {}  # by rank: the first exception that ended a thread of its program
        self._signals_sent: set[int] = set()

    def name(self, number: int) -> str:
        """Formats "rank 3", "server 0"."""
        return f"rank {number}" if number < self.size else f"server {number - self.size}"

    def note_start(self, number: int, pid: int, host: str = "") -> None:
        """Records the start of a process; `pid` is 0 until known, `host` is set if it is not hvdrun's."""
        self._names[number] = name_process(self.name(number), pid, host)

    def note_exit(self, status: ExitStatus) -> None:
        self._statuses[status.rank] = status

    def note_signal(self, number: int) -> None:
        """Records that hvdrun itself has sent this signal to all ranks."""
        self._signals_sent.add(number)

    def note_event(self, event: RankEvent) -> None:
        if event.kind == "arrived":
            self._arrived.add(event.rank)
        elif event.kind == "initialised":
            self._members.add(event.rank)
            self._secondary.discard(event.rank)
            self._disconnected.discard(event.rank)
            if self._abort and self._abort.generation < event.generation:  # the job has recovered from it
                self._abort = None
        elif event.kind == "finished":
            self._members.discard(event.rank)
        elif event.kind == "thread_failed":
            self._threads.setdefault(event.rank, first_line(event.text))
        elif event.kind == "disconnected":
            self._disconnected.add(event.rank)
        elif event.kind == "peer_lost":
            self._secondary.add(event.rank)
            self._reasons[event.rank] = first_line(event.text)
        elif event.kind == "aborted" and self._abort is None and event.rank not in self._secondary:
            self._abort = event
            self._reasons[event.rank] = first_line(event.text)
        elif event.kind in ("overdue", "departed"):
            self._absent = event
            self._secondary.update(self._names.keys() - set(event.missing))

    def note_report(self, rank: int, report: Mapping[str, Any]) -> None:
        """Records a rank's report of why its world ended; the report is untrusted input."""
        culprit, reason = report.get("culprit"), report.get("reason")
        if not isinstance(culprit, int) or culprit not in self._names or not isinstance(reason, str):
            return
        if culprit != rank:
            self._secondary.add(rank)
            self._blamed.setdefault(culprit, first_line(reason))
        if report.get("status") == "timeout" and self._late is None:
            self._late = culprit, first_line(reason)

    def describe_end(self, rank: int) -> str:
        """Returns the text for ranks that wait for a rank which has ended without an error."""
        return "has ended (exit code 0)" + ("" if rank in self._arrived else " without calling hvd.init()")

    @property
    def notice(self) -> str:
        """Returns a notice after a successful job: "", that threads failed, or that no ranks communicated."""
        if threads := describe_threads({self._name(rank): text for rank, text in self._threads.items()}):
            return threads
        if self.size == 1 or self._arrived:
            return ""
        if self._uses_torch_variables:
            return (
                f"no rank used sirtaki: these were {self.size} separate runs, or torch.distributed exchanged "
                "tensors by another backend (with hvdrun --as-gloo, sirtaki stands for gloo)"
            )
        text = f"no rank called hvd.init(): these were {self.size} separate runs, which exchanged nothing"
        advice = ". To train one model on all of them, call it at the start of the script"
        return text + advice * self._runs_python

    @property
    def failed(self) -> bool:
        return self._absent is not None or any(status.failed for status in self._statuses.values())

    @property
    def survivors(self) -> set[int]:
        """Returns the running ranks that have completed init: these will notice a lost peer."""
        return self._members - self._statuses.keys()

    @property
    def conclusive(self) -> bool:
        """Returns whether no further event can point to another rank."""
        culprit = self._culprit()
        if culprit is None:
            return False
        return culprit.died or (self._abort is not None and culprit.rank == self._abort.rank)

    def failure(self) -> JobFailure:
        """Returns the failure and the rank that caused it.

        In this order: a rank killed by a signal that hvdrun did not send; the origin of the first abort; the
        rank that kept the other ranks waiting; the first rank that failed. A rank that only lost a peer comes
        last.
        """
        culprit = self._culprit()
        if culprit and culprit.lost:
            return self._failure_of_host(culprit)
        if culprit and culprit.died:
            return JobFailure(culprit.exit_code, self._describe(culprit), culprit.rank)
        if self._abort is not None and self._abort.rank not in self._statuses:
            reason = self._reasons[self._abort.rank] or "it named no reason"
            text = f"{self._name(self._abort.rank)} gave up: {reason}"
            return JobFailure(1, text, culprit=self._abort.rank)
        if self._late is not None and self._abort is None:
            return self._failure_by_lateness(*self._late)
        if culprit:
            return self._failure_of(culprit)
        if self._absent:
            return JobFailure(1, self._describe_absence(self._absent), self._absent.missing[0])
        return self._failure_by_loss()

    def with_late_reason(self, failure: JobFailure) -> JobFailure:
        """Returns a failure with the exception of the rank that caused it, if that has come since."""
        status = self._statuses.get(failure.rank) if failure.rank is not None else None
        if status is None or failure.culprit != failure.rank or self._abort is None:
            return failure
        return self._failure_of(status) if self._abort.rank == failure.rank else failure

    def _failure_of(self, status: ExitStatus) -> JobFailure:
        reason = self._reasons.get(status.rank, "")
        explained = None if reason else status.rank
        return JobFailure(status.exit_code, self._describe(status, reason), explained, culprit=status.rank)

    def _failure_by_lateness(self, culprit: int, reason: str) -> JobFailure:
        codes = [status.exit_code for status in self._statuses.values() if status.failed]
        text = f"{self._name(culprit)} kept other ranks waiting for too long: {reason}"
        return JobFailure(next(iter(codes), 1), text)

    def _failure_of_host(self, culprit: ExitStatus) -> JobFailure:
        lost = sorted(
            status.rank for status in self._statuses.values() if status.lost and status.host == culprit.host
        )
        ranks = [number for number in lost if number < self.size]
        servers = [self.name(number) for number in lost if number >= self.size]
        subject = " and ".join([*([name_ranks(ranks)] if ranks else []), *servers])
        return JobFailure(1, f"the host {culprit.host} was lost, and {subject} with it: {culprit.lost}")

    def _failure_by_loss(self) -> JobFailure:
        """Returns the failure when every failed rank had lost a peer, or was ended by hvdrun itself.

        The two ranks of a broken connection blame each other. The one that closed it has usually closed its
        connection to hvdrun as well.
        """
        failures = [status for status in self._statuses.values() if status.failed]
        for status in self._statuses.values():
            if not status.failed and status.rank in self._members:
                text = f"{self._name(status.rank)} ended with exit code 0, but without hvd.shutdown()"
                return JobFailure(failures[0].exit_code, f"{text}, while another rank needed it", status.rank)
        for rank in sorted(self._blamed, key=lambda rank: rank not in self._disconnected):
            blamed = self._statuses.get(rank)
            if blamed is None:  # the blamed rank may need longer to end than the others
                return JobFailure(failures[0].exit_code, self._blamed[rank])
            if rank in self._disconnected and blamed.failed and blamed.killed_by not in self._signals_sent:
                return JobFailure(blamed.exit_code, self._describe(blamed, _CONNECTIONS_CLOSED))
        for status in failures:
            if status.killed_by not in self._signals_sent:
                reason = self._reasons.get(status.rank, "")
                explained = self._explain_finished_peers(status, reason)
                text = explained or self._describe(status, reason or "it had lost another rank")
                return JobFailure(status.exit_code, text)
        return JobFailure(failures[0].exit_code, self._describe(failures[0]))

    def _explain_finished_peers(self, status: ExitStatus, reason: str) -> str:
        """Returns the failure's text if this rank failed because peers had ended normally, else ""."""
        peers = finished_peers(reason)
        if peers is None:
            return ""
        have_ended = all(rank in self._statuses for rank in peers.ranks)
        event = "ended with exit code 0" if have_ended else "had finished"
        cause = next((self._threads[rank] for rank in peers.ranks if rank in self._threads), "")
        return peers.explain(event, self._name(status.rank), cause)

    def _culprit(self) -> ExitStatus | None:
        candidates = [
            status
            for rank, status in self._statuses.items()
            if status.failed and rank not in self._secondary and status.killed_by not in self._signals_sent
        ]
        died = [status for status in candidates if status.died]
        origin = [
            candidate
            for candidate in candidates
            if self._abort is not None and candidate.rank == self._abort.rank
        ]
        return next(iter(died or origin or candidates), None)

    def _describe_absence(self, event: RankEvent) -> str:
        subject = " and ".join(self._name(rank) for rank in event.missing)
        first = event.missing[0]
        have = "has" if len(event.missing) == 1 else "have"
        if event.kind == "departed" and first not in self._statuses:
            return f"{subject} {have} left hvd.init(): {event.text}"
        if first in self._statuses:
            return f"{subject} {self.describe_end(first)} while another rank waited in hvd.init()"
        action = "come to the end of" if first in self._arrived else "called"
        waited = f"another rank has waited for {self._start_timeout:g} s (--start-timeout)"
        return f"{subject} {have} not {action} hvd.init(); {waited}"

    def _describe(self, status: ExitStatus, reason: str = "") -> str:
        """Describes an end in a sentence; `reason` is the exception that the process raised, if known."""
        subject = self._name(status.rank)
        if status.lost:
            return f"{subject} was lost with its host: {status.lost}"
        if not status.killed_by:
            return f"{subject} failed with exit code {status.code}{reason and ': '}{reason}"
        text = f"{subject} was {killed_by(status.killed_by)}"
        if status.killed_by == signal.SIGKILL:
            return f"{text}: often the machine ran out of memory"
        return text

    def _name(self, number: int) -> str:
        return self._names[number]


def name_process(name: str, pid: int, host: str = "") -> str:
    """Formats "rank 3 (pid 70)", "rank 3 (pid 70 on hostB)"."""
    where = f"pid {pid}" * bool(pid) + " " * bool(pid and host) + f"on {host}" * bool(host)
    return f"{name} ({where})" if where else name


def describe_threads(failures: Mapping[str, str]) -> str:
    """Describes exceptions that ended threads of ranks, by the names of these; "" if there are none."""
    if not failures:
        return ""
    (subject, text), *others = failures.items()
    more = f"; so did {len(others)} more {'rank' if len(others) == 1 else 'ranks'}" * bool(others)
    return f"{subject} went on after a failure, and ended with exit code 0: {text}{more}"


def first_line(text: str) -> str:
    """Returns the first line of a rank's text."""
    return next(iter(text.splitlines()), "")


def killed_by(number: int) -> str:
    """Formats "killed by signal 9 (SIGKILL)"."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "a real-time signal"
    return f"killed by signal {number} ({name})"


# ---- A failure caused by another rank's normal end: the ranks made different numbers of calls -----------


_RANK = re.compile(r"\brank (\d+)")
# The text of core/control/operations/validation.cc, and the line of the call that a rank's reason ends with.
_TEXT = re.compile(
    r"(?:(?P<ended>'.+'): )?(?P<peers>rank \d+\b.*?) (?:has|have) finished and cannot take part"
    r"(?: in (?P<operation>.+?))?(?: \((?P<place>(?:in .+ )?at [^()]+:\d+)\))?$"
)
_ADVICE = "the ranks made different numbers of calls. Give each rank the same number, for example of batches"


class FinishedPeers(NamedTuple):
    """The ranks that had finished while another rank still needed them.

    Attributes:
        subject: their names, as the core lists them.
        operation: the quoted name of the tensor, or a description of the operation; "" if unknown.
        place: the user's line of the call, as "in step() at train.py:12"; "" if unknown.
    """

    subject: str
    operation: str
    place: str

    @property
    def ranks(self) -> list[int]:
        return [int(number) for number in _RANK.findall(self.subject)]

    def explain(self, event: str, waiting: str, cause: str = "") -> str:
        """Formats the failure of the rank `waiting`; `event` is the verb for what the finished ranks did.

        `cause` is the reason, if it is known not to be different numbers of calls.
        """
        call = f" for {self.operation}" * bool(self.operation) + f" ({self.place})" * bool(self.place)
        them = "it" if len(self.ranks) == 1 else "them"
        return f"{self.subject} {event} while {waiting} still needed {them}{call}: {cause or _ADVICE}"


def finished_peers(reason: str) -> FinishedPeers | None:
    """Returns what a rank's reason says about ranks that had finished; None for any other reason."""
    found = _TEXT.search(reason)
    if found is None:
        return None
    operation = found["operation"] or found["ended"] or ""
    operation = f"tensor {operation}" if operation.startswith("'") else operation
    return FinishedPeers(found["peers"], operation, found["place"] or "")
