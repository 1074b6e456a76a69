"""The agent: the process that hvdrun starts on another host, over ssh or by srun, to run that host's ranks.

It exchanges frames with hvdrun over its standard input and output. When its standard input closes, hvdrun or
the network is gone, and the agent's reaper ends the ranks; the same happens if the agent itself is killed, or
if its lease ends while it is stopped. Its arguments and its environment contain no secrets: the job's key
arrives as a message and is stored in a separate file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.address import unix_addresses
from sirtaki.bindings.bootstrap.connection.descriptor_limit import allow_descriptors
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, Sender, WireError
from sirtaki.bindings.bootstrap.job import Job, RendezvousError
from sirtaki.bindings.observing.watch_marks import FOLDER as STATES
from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.hosts.channel import FINAL_CREDIT, INITIAL_CREDIT, LINES, START_MARK, Channel
from sirtaki.runner.hosts.lease import AgentLease, lease_clock
from sirtaki.runner.hosts.relays import ORDERS, Relays
from sirtaki.runner.launch.capacity import Capacity, count_gpus, usable_cores
from sirtaki.runner.launch.environment import RankEnvironment, encrypts, merge_login, thread_counts
from sirtaki.runner.launch.errors import CannotStart, LaunchError
from sirtaki.runner.launch.job_folder import JobFolder
from sirtaki.runner.launch.process import (
    REPORTS,
    TIMELINE,
    ProcessStart,
    RankProcess,
    remove_reports,
    report_file,
    start_process,
    starts_of,
)
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.launch.torch_variables import ReservedPort, offer_of_agent
from sirtaki.runner.observe.endpoints import Endpoints
from sirtaki.runner.observe.timeline import elastic_parts, rank_file
from sirtaki.runner.supervise.failure_analysis import ExitStatus
from sirtaki.runner.supervise.signals import WakeupPipe

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.server.rendezvous_collector import RendezvousCollector
    from sirtaki.runner.elastic.spares.host_spares import HostSpares, SpareProcess

ALIVE_SECONDS = 10.0  # between two ALIVE frames
_COLLECT_SECONDS = 0.02  # no event announces that a rank has written its report
_MAX_BACKLOG = 1024 * 1024
_READ_BYTES = 64 * 1024
_MAX_FINAL_READS = FINAL_CREDIT // _READ_BYTES
_STREAMS = {1: MessageKind.STDOUT, 2: MessageKind.STDERR}


class Agent:
    """One host's part of a job, from hvdrun's question to the end."""

    def __init__(self, selector: selectors.BaseSelector, wakeup: WakeupPipe, reaper: Reaper) -> None:
        self._selector = selector
        self._wakeup = wakeup
        self._reaper = reaper
        self._job: AgentJob | None = None
        self._folder = ""  # the ranks' working directory
        self._port: ReservedPort | None = None  # for rank 0 of a job that sets torch's variables
        self._credit = dict.fromkeys(_STREAMS, INITIAL_CREDIT)  # bytes that hvdrun has granted
        # By open descriptor: the process that writes, which may become another rank, and the stream's number.
        self._streams: dict[int, tuple[RankProcess, int]] = {}
        self._reading: set[int] = set()
        self._collecting = False
        self._remaining_files: Iterator[Frame] | None = None  # set once all ranks have ended
        self._finished = False
        self._leaves = False  # it was asked to end, and has told hvdrun
        reading, writing = _take_standard_streams()
        lines = "write" if LINES in sys.argv else ""
        self._channel = Channel(reading, writing, selector, self._receive, Sender.HVDRUN, lines=lines)
        self._relays = Relays(selector, self._channel.send, reaper)
        self._lease = AgentLease(0.0, 0.0)
        self._next_alive = time.monotonic() + ALIVE_SECONDS

    def run(self) -> int:
        """Runs the agent; returns its exit code when nothing is left behind, or when hvdrun is gone."""
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._handle_wakeup)
        self._wakeup.unblock_signals()
        self._channel.send_bytes(START_MARK)
        while not self._finished and not self._channel.ended and not self._lease.is_over(lease_clock()):
            self._iterate(self._poll_timeout())
        if self._job is not None and self._lease.is_over(lease_clock()):
            self._job.kill()
            print(
                "sirtaki's agent: nothing was heard from hvdrun: the ranks here were ended", file=sys.stderr
            )
            return 1
        while self._channel.backlog and not self._channel.ended:
            self._iterate(ALIVE_SECONDS)
        if self._channel.error:
            print(f"sirtaki's agent: {self._channel.error}", file=sys.stderr)
        return 0 if self._finished and not self._channel.ended else 1

    def _iterate(self, timeout: float) -> None:
        self._balance()
        self._relays.balance(self._channel.backlog)
        for key, _ in self._selector.select(timeout):
            key.data()
        if self._collecting:
            self._send_reports()
        self._finish_step()
        now = time.monotonic()
        if self._job is not None and self._job.spares is not None:
            self._job.spares.advance(now)
        self._reaper.kill_at(self._lease.end)
        if now >= self._next_alive:
            self._next_alive = now + min(ALIVE_SECONDS, self._lease.interval)
            self._channel.send(Frame(MessageKind.ALIVE, 0, number=self._lease.ask(lease_clock())))

    def _poll_timeout(self) -> float:
        if self._collecting:
            return _COLLECT_SECONDS
        due = self._job.spares.due if self._job is not None and self._job.spares is not None else None
        due = self._next_alive if due is None else min(due, self._next_alive)
        return min(max(due - time.monotonic(), 0.0), self._lease.seconds_left(lease_clock()))

    def _receive(self, frame: Frame) -> None:
        if frame.kind == MessageKind.ASK:
            self._answer(frame)
        elif frame.kind in ORDERS:
            self._relay(frame)
        elif frame.kind == MessageKind.START and self._job is None:
            self._start(frame)
        elif frame.kind == MessageKind.SIGNAL and self._job is not None:
            self._signal(self._job, frame)
        elif frame.kind == MessageKind.LAUNCH and self._job is not None:
            self._launch(self._job, frame)
        elif frame.kind == MessageKind.SPARE and self._job is not None:
            self._spares_of(self._job, frame.values).start(frame.rank)
        elif frame.kind == MessageKind.DISMISS and self._job is not None and self._job.spares is not None:
            self._job.spares.dismiss(frame.rank)
        elif frame.kind == MessageKind.WATCH and self._job is not None:
            self._send_states(self._job, frame.number)
        elif frame.kind == MessageKind.ORDER and self._job is not None:
            self._take_order(self._job, frame)
        elif frame.kind == MessageKind.LEASE:
            self._lease.renew(frame.number)
        elif frame.kind == MessageKind.GRANT and frame.rank in self._credit:
            self._credit[frame.rank] = min(self._credit[frame.rank] + frame.number, INITIAL_CREDIT)
        elif frame.kind == MessageKind.COLLECT:
            self._collecting = True
        elif frame.kind == MessageKind.FINISH:
            self._collect_remaining_files()
        else:
            raise frame.unexpected()

    def _answer(self, frame: Frame) -> None:
        self._folder = str(frame.values.get("folder", ""))
        answer: dict[str, Any] = {
            "version": VERSION,
            "host": socket.gethostname(),
            "gpus": count_gpus(),
            "problem": _find_problem(self._folder, frame.values),
        }
        if frame.values.get("torch"):
            self._port = ReservedPort()
            interfaces = [str(name) for name in frame.values.get("interfaces", [])]
            answer["torch"] = asdict(offer_of_agent(self._port, interfaces))
        self._channel.send(Frame.of(MessageKind.ANSWER, answer))

    def _relay(self, frame: Frame) -> None:
        with self._wakeup.signals_blocked():
            self._relays.take(frame)

    @contextlib.contextmanager
    def _starting(self, what: str) -> Iterator[None]:
        """Blocks signals while `what` is started. Raises WireError if that fails."""
        try:
            with self._wakeup.signals_blocked():
                yield
        except (LaunchError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"{what} cannot be started: {error}") from None

    def _start(self, frame: Frame) -> None:
        with self._starting("the ranks"):
            self._job = AgentJob(frame.values, usable_cores(), self._reaper)
            self._job.start(self._channel.send)
        for rank in self._job.running:
            self._read_from(rank)
        self._lease.begin(self._job.lease_seconds, lease_clock())
        self._next_alive = 0.0

    def _launch(self, job: AgentJob, frame: Frame) -> None:
        with self._starting("a rank"):
            rank = job.launch(frame.rank, frame.values, self._channel.send)
        if rank is not None:
            self._read_from(rank)

    def _spares_of(self, job: AgentJob, values: Mapping[str, Any]) -> HostSpares:
        """Returns the spares of a job, which all start with the values of the first SPARE frame."""
        if job.spares is None:
            from sirtaki.runner.elastic.spares.host_spares import HostSpares

            with self._starting("a spare"):
                start_spare = job.spare_start(values)

            def start() -> SpareProcess:
                with self._wakeup.signals_blocked():
                    return start_spare()

            reports = SpareReports(self._channel.send)
            job.spares = HostSpares(start, self._read_from, job.folder, self._selector, reports)
        return job.spares

    def _read_from(self, rank: RankProcess) -> None:
        for number, descriptor in ((1, rank.stdout), (2, rank.stderr)):
            os.set_blocking(descriptor, False)
            self._streams[descriptor] = rank, number

    def _signal(self, job: AgentJob, frame: Frame) -> None:
        job.signal(frame.rank, frame.number)
        if frame.number == signal.SIGTSTP:
            self._lease.suspend()
        elif frame.number == signal.SIGCONT:
            self._lease.resume(lease_clock())

    def _handle_wakeup(self) -> None:
        numbers = self._wakeup.read()
        self._reaper.replace_if_killed()
        self._relays.poll()
        if self._job is not None:
            self._job.endpoints.check()
            for status in self._job.poll():
                values = {"code": status.code, "killed_by": status.killed_by}
                self._channel.send(Frame.of(MessageKind.ENDED, values, status.rank))
        if (
            signal.SIGTERM in numbers
            and self._job is not None
            and self._job.comes_and_goes
            and not self._leaves
        ):
            self._leaves = True
            self._channel.send(Frame(MessageKind.LEAVING))
        elif any(number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for number in numbers):
            self._finished = True

    def _balance(self) -> None:
        """Polls only the streams that hvdrun has granted credit; the other ranks wait."""
        ready = {descriptor for descriptor, (_, number) in self._streams.items() if self._credit[number] > 0}
        for descriptor in self._reading - ready:
            self._selector.unregister(descriptor)
        for descriptor in ready - self._reading:
            self._selector.register(
                descriptor, selectors.EVENT_READ, lambda d=descriptor: self._forward_within_credit(d)
            )
        self._reading = ready

    def _forward_within_credit(self, descriptor: int) -> None:
        if descriptor in self._streams and (credit := self._credit[self._streams[descriptor][1]]) > 0:
            self._forward(descriptor, min(credit, _READ_BYTES))

    def _forward(self, descriptor: int, limit: int) -> bool:
        """Forwards up to `limit` bytes of a rank's output; returns False if there is none, or at its end."""
        process, number = self._streams[descriptor]
        try:
            data = os.read(descriptor, limit)
        except BlockingIOError:
            return False
        if not data:
            self._close(descriptor)
            return False
        self._credit[number] -= len(data)
        self._channel.send(Frame(_STREAMS[number], process.rank, data))
        return True

    def _close(self, descriptor: int) -> None:
        del self._streams[descriptor]
        if descriptor in self._reading:
            self._reading.discard(descriptor)
            self._selector.unregister(descriptor)
        os.close(descriptor)

    def _send_reports(self) -> None:
        if self._job is not None:
            for frame in self._job.new_reports():
                self._channel.send(frame)

    def _send_states(self, job: AgentJob, number: int) -> None:
        from sirtaki.runner.observe.remote_states import answers  # jobs that nobody watches need none of it

        for frame in answers(job.folder / STATES, number):
            self._channel.send(frame)

    def _take_order(self, job: AgentJob, frame: Frame) -> None:
        from sirtaki.runner.observe.remote_states import take_order

        take_order(job.folder / STATES, frame)

    def _collect_remaining_files(self) -> None:
        self._collecting = False
        if self._job is not None:
            self._job.endpoints.release()
            self._job.close_collector()
            self._job.reap()
        self._send_reports()
        self._remaining_files = self._job.timelines() if self._job is not None else iter(())

    def _finish_step(self) -> None:
        """Sends more of the remaining files; then has the reaper end all descendants; then sends DONE.

        Hosts behind this one have ended before: the reaper would end the connections to them.
        """
        while self._remaining_files is not None and self._channel.backlog < _MAX_BACKLOG:
            frame = next(self._remaining_files, None)
            if frame is not None:
                self._channel.send(frame)
                continue
            if self._relays.running:
                return
            self._reaper.release()
            if not self._reaper.ended():  # its end wakes the main loop
                return
            for descriptor in list(self._streams):
                for _ in range(_MAX_FINAL_READS):
                    if not self._forward(descriptor, _READ_BYTES):
                        break
            self._channel.send(Frame(MessageKind.DONE))
            self._remaining_files = None
            self._finished = True


def _find_problem(folder: str, question: Mapping[str, Any]) -> str:
    """Returns what this host lacks, to follow its name; "" if nothing. Enters the folder."""
    program = str(question.get("program", ""))
    try:
        os.chdir(folder)
    except OSError as error:
        reason = f"has no folder {folder} as hvdrun's host has ({error.strerror})"
        return f"{reason}: start the job from a folder that all hosts have"
    if not os.path.exists(program):
        return f"has no program {program} as hvdrun's host has: install it there, at the same path"
    if os.path.isdir(program) or not os.access(program, os.X_OK):
        return f"has {program}, but cannot run it: make it executable with `chmod +x`"
    if "metrics" in question:
        from sirtaki.runner.observe.endpoints import find_problem

        return find_problem(str(question["metrics"]))
    return ""


def _take_standard_streams() -> tuple[int, int]:
    """Returns the agent's input and output, and ensures that nothing else reads from or writes to them."""
    reading, writing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return reading, writing


def main() -> int:
    selector = selectors.PollSelector()
    with contextlib.closing(WakeupPipe()) as wakeup, Reaper() as reaper:
        wakeup.block_signals()
        return Agent(selector, wakeup, reaper).run()


# ---- The reports of an agent about the spares of its host ----------------------------------------------


@dataclass(frozen=True)
class SpareReports:
    """Sends the reports of a host's spares to hvdrun."""

    send: Callable[[Frame], None]

    def started(self, lane: int, pid: int) -> None:
        self.send(Frame(MessageKind.STARTED, lane, number=pid))

    def waits(self, lane: int, modules: int, seconds: float) -> None:
        self.send(Frame.of(MessageKind.SPARE_WAITS, {"modules": modules, "seconds": seconds}, lane))

    def ended(self, lane: int, why: str) -> None:
        self.send(Frame.of(MessageKind.SPARE_ENDED, why, lane))


# ---- The ranks of an agent's host, which it starts from a message; their files, which it collects ------


_PIECE_BYTES = 64 * 1024
# Descriptors: the ends of two pipes, and up to three connections to the collector: at two addresses during a
# handshake, and one for calls.
_PER_RANK = 5


class AgentJob:
    """The ranks, table servers and spares of this host, as described by the `values` of the START frame."""

    def __init__(self, values: Mapping[str, Any], cores: int, reaper: Reaper) -> None:
        """Raises LaunchError, or KeyError, TypeError or ValueError if the values are malformed."""
        self._reaper = reaper
        self.comes_and_goes = "slots" in values  # its ranks are started one by one, and replaced
        self._servers = [int(number) for number in values.get("servers", [])]
        count = int(values["slots"]) if self.comes_and_goes else len(values["placements"])
        self.lease_seconds = float(values.get("lease", 0.0))
        self._capacity = Capacity(count, cores, servers=len(self._servers))
        if not values.get("oversubscribe"):
            self._capacity.check()
        self._job_folder = JobFolder(reaper, bytes.fromhex(values["key"]))
        self.folder = self._job_folder.path
        self._timeline = self.folder / "timeline"
        self._command = [str(word) for word in values["command"]]
        self._placements = [RankPlacement(*map(int, placement)) for placement in values["placements"]]
        self._base = merge_login({str(k): str(v) for k, v in values["environment"].items()}, os.environ)
        additions = thread_counts(count + len(self._servers), cores, self._base)
        additions |= {str(k): str(v) for k, v in values["additions"].items()}
        self.endpoints = Endpoints(self.folder, reaper, _say)
        self.endpoints.serve_metrics(None if (address := values.get("metrics")) is None else str(address))
        additions.setdefault(REPORTS, str(self.folder))
        self._reports = Path(additions[REPORTS])
        remove_reports(self._reports, [placement.rank for placement in self._placements])
        if TIMELINE in additions:
            additions[TIMELINE] = str(self._timeline)
        self._collector = self._make_collector(values, additions)
        self._environment = RankEnvironment(
            str(values["job"]),
            str(values["rendezvous"]) if self._collector is None else self._collector.address,
            self._job_folder.key_file,
            float(values["start_timeout"]),
            additions,
            {str(k): str(v) for k, v in values.get("torch", {}).items()},
        )
        self._reported_ranks: set[int] = set()
        self.running: list[RankProcess] = []
        self.spares: HostSpares | None = None

    def _make_collector(
        self, values: Mapping[str, Any], additions: Mapping[str, str]
    ) -> RendezvousCollector | None:
        """Creates the collector of this host's ranks; returns None where they connect to hvdrun directly.

        A single rank does. In an elastic job each generation has a rendezvous of its own.
        """
        count = len(self._placements)
        if self.comes_and_goes or count < 2:
            return None
        from sirtaki.bindings.bootstrap.server.rendezvous_collector import RendezvousCollector

        allow_descriptors(_PER_RANK * count)
        encrypt = encrypts({**self._base, **additions})
        job = Job(
            str(values["job"]), self._placements[0].size, bytes.fromhex(values["key"]), VERSION, encrypt
        )
        address = unix_addresses(f"sirtaki-{secrets.token_hex(16)}", str(self.folder))
        timeout = float(values["start_timeout"])
        try:
            return RendezvousCollector(address, job, str(values["rendezvous"]), count, timeout, _say)
        except RendezvousError as error:
            raise LaunchError(str(error)) from None

    def start(self, send: Callable[[Frame], None]) -> None:
        """Starts all ranks, and reports the process of each, or why it could not be started.

        Afterwards starts the collector's thread; signals are blocked meanwhile.
        """
        command, placements = self._command, self._placements
        for start in starts_of(command, self._environment, self._base, placements, self._servers):
            if shortage := self._capacity.shortage(len(self.running)):
                raise LaunchError(shortage)
            self._start(start, send)
        if self._collector is not None:
            self._collector.start()

    def launch(
        self, rank: int, values: Mapping[str, Any], send: Callable[[Frame], None]
    ) -> RankProcess | None:
        """Starts a rank: assigns the spare that `values` names, else starts and returns a process.

        Returns None if a spare was assigned, or if the process cannot be started. Raises KeyError, TypeError
        or ValueError if the values are malformed.
        """
        environment = self._environment_of(values)
        if self.spares is not None and "spare" in values:
            with contextlib.suppress(OSError):  # the spare will name what is missing
                self._job_folder.restore_key()
            spare = self.spares.take(int(values["spare"]), rank, environment)
            if spare is not None:
                self._note_start(spare, send)
                return None
        return self._start(ProcessStart(rank, f"rank {rank}", self._command, environment), send)

    def spare_start(self, values: Mapping[str, Any]) -> Callable[[], SpareProcess]:
        """Returns a function that starts a spare with the job's environment and the additions in `values`.

        Raises KeyError, TypeError or ValueError if the values are malformed; the function raises OSError or
        LaunchError.
        """
        from sirtaki.runner.elastic.spares.host_spares import SpareProcess
        from sirtaki.runner.elastic.spares.spare_command import check_spare_command

        environment, runs_script = self._environment_of(values), bool(values["runs_script"])

        def start() -> SpareProcess:
            check_spare_command(self._command)  # a script may differ from the one on hvdrun's host
            return SpareProcess(self._command, environment, self.folder, runs_script, self._reaper)

        return start

    def _environment_of(self, values: Mapping[str, Any]) -> dict[str, str]:
        placement = RankPlacement(*map(int, values["placement"]))
        additions = {str(k): str(v) for k, v in values["additions"].items()}
        return {**self._environment.of(placement, self._base), **additions}

    def _start(self, start: ProcessStart, send: Callable[[Frame], None]) -> RankProcess | None:
        try:
            process = start_process(start, self._job_folder, self._reaper)
        except CannotStart as error:
            text = str(error)
        except LaunchError:
            if not self.comes_and_goes:
                raise
            text = "a rank was not started, because this host's part in the job is to end"
        else:
            self._note_start(process, send)
            return process
        send(Frame.of(MessageKind.REFUSED, text, start.number))
        return None

    def _note_start(self, process: RankProcess, send: Callable[[Frame], None]) -> None:
        self.running.append(process)
        send(Frame(MessageKind.STARTED, process.rank, number=process.pid))

    def poll(self) -> Iterator[ExitStatus]:
        """Yields how ranks have ended since the last call; spares report that themselves."""
        if self.spares is not None:
            self.spares.check()
        for rank in self.running:
            if status := rank.check():
                if self.comes_and_goes and status.failed:
                    rank.clear()
                yield status

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to the newest rank of this number; SIGKILL also to what it has left behind."""
        newest = next((process for process in reversed(self.running) if process.rank == rank), None)
        if newest is not None and (newest.exit_status is None or number == signal.SIGKILL):
            newest.signal(number)

    def kill(self) -> None:
        """Kills all ranks and spares."""
        for process in self.running:
            process.signal(signal.SIGKILL)
        if self.spares is not None:
            self.spares.kill()

    def close_collector(self) -> None:
        """Closes the collector, if there is any: all ranks have ended."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    def reap(self) -> None:
        for rank in self.running:
            if rank.exit_status:
                rank.reap()
        if self.spares is not None:
            self.spares.reap()

    def new_reports(self) -> Iterator[Frame]:
        """Yields the failure reports that ranks have written since the last call."""
        for placement in self._placements:
            file = report_file(self._reports, placement.rank)
            if placement.rank in self._reported_ranks or not file.is_file():
                continue
            self._reported_ranks.add(placement.rank)
            with open(file, "rb") as opened:
                content = opened.read(MessageKind.REPORT.limit + 1)
            if len(content) <= MessageKind.REPORT.limit:
                yield Frame(MessageKind.REPORT, placement.rank, content)

    def timelines(self) -> Iterator[Frame]:
        """Yields the timelines of all ranks, in pieces."""
        for placement in self._placements:
            for piece in _pieces(rank_file(self._timeline, placement.rank)):
                yield Frame(MessageKind.TIMELINE, placement.rank, piece)
        for part in elastic_parts(self._timeline):
            for piece in _pieces(part.file(self._timeline)):
                yield Frame(MessageKind.WORKER_TIMELINE, part.worker, piece, part.generation)


def _pieces(file: Path) -> Iterator[bytes]:
    if file.is_file():
        with open(file, "rb") as opened:
            while piece := opened.read(_PIECE_BYTES):
                yield piece


def _say(line: str) -> None:
    """Shows a line on hvdrun's standard error, behind the name of this host."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
