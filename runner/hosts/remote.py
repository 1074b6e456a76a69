"""Another host and its ranks, as the supervisor sees them: hvdrun's side of an agent."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, Sender, WireError, one_line
from sirtaki.bindings.observing.ownership import held_folder
from sirtaki.runner.hosts.agent_launcher import AgentLauncher
from sirtaki.runner.hosts.channel import FINAL_CREDIT, INITIAL_CREDIT, Channel, LoginOutput, Outgoing
from sirtaki.runner.hosts.lease import HostLease, lease_clock
from sirtaki.runner.launch.errors import NOT_EXECUTABLE
from sirtaki.runner.launch.process import Process
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.launch.torch_variables import MasterOffer
from sirtaki.runner.observe.remote_states import RemoteStates
from sirtaki.runner.observe.timeline import JobTimeline, TimelinePart
from sirtaki.runner.supervise.display import STDERR, STDOUT, Display
from sirtaki.runner.supervise.failure_analysis import ExitStatus
from sirtaki.runner.supervise.post_mortem import PostMortem

if TYPE_CHECKING:
    from sirtaki.runner.elastic.spares.host_spares import SpareNews

SILENCE_SECONDS = 60.0  # an agent sends ALIVE more often than this
_MOST_PARTS = 10_000  # files of a timeline
_MOST_UNREAD = 64 << 20  # bytes; START, the largest frame, has 16 MiB


class RemoteRank:
    """A rank on another host, as the supervisor sees it."""

    def __init__(self, rank: int, host: RemoteHost) -> None:
        self.rank = rank
        self.pid = 0  # 0 until the agent has reported it
        self.exit_status: ExitStatus | None = None  # set once `check` has returned it
        self._host = host
        self._noted: ExitStatus | None = None

    @property
    def is_awaited(self) -> bool:
        """Returns whether the agent has not yet reported that the rank has started, or why it has not."""
        return not self.pid and self._noted is None

    def check(self) -> ExitStatus | None:
        """Returns how the rank ended, if it has ended since the last call."""
        if self.exit_status is None and self._noted is not None:
            self.exit_status = self._noted
            return self.exit_status
        return None

    def signal(self, number: int) -> None:
        """Sends a signal to all processes in the rank's process group."""
        if self._noted is None:
            self._host.send(Frame(MessageKind.SIGNAL, self.rank, number=number))

    def reap(self) -> None:
        """Does nothing: the agent reaps the rank."""

    def clear(self) -> None:
        """Ends what the rank has left behind, which the agent does by itself for a rank that has failed."""
        if self._noted is not None and not self._noted.failed:
            self._host.send(Frame(MessageKind.SIGNAL, self.rank, number=signal.SIGKILL))

    def note(self, status: ExitStatus) -> bool:
        """Records how the rank ended; returns False if it was already known."""
        is_new = self._noted is None
        self._noted = self._noted or status
        return is_new


@dataclass
class RemoteJob:
    """The receivers of a host's messages once its ranks are to start."""

    ranks: MutableMapping[int, RemoteRank]
    post_mortem: PostMortem | None  # stores the files that these ranks leave
    on_start: Callable[[int, int], None]  # arguments: a rank and its pid
    on_exit: Callable[[], None]
    timeline: JobTimeline | None = None
    lease: HostLease | None = None  # of a job that goes on without a lost host
    spares: SpareNews | None = None  # of a job that has spares
    states: Path | None = None  # the folder of the states of this host's ranks


class RemoteHost:
    """A process of ssh or srun, and the exchange of frames between hvdrun and the agent behind it.

    Life cycle: `connect` sends the question (the result is `answer`, or `failure`: why the host cannot take
    part); `start` starts its ranks; `finish` has it send the remaining files and end; then `ended` is true.
    """

    def __init__(
        self, name: str, launcher: AgentLauncher, selector: selectors.BaseSelector, display: Display
    ) -> None:
        self.name = name
        self.answer: Mapping[str, Any] | None = None
        self.master_offer: MasterOffer | None = None  # if the agent was asked for it
        self.failure = ""
        self.done = False  # whether the agent has reported that nothing is left behind
        self.lost = False  # the connection broke while ranks were running
        self.accepted = False  # its agent has begun the job
        self.silent_since: float | None = None  # when it was last heard of, if it was given up for that
        self.leaves = False  # its agent was asked to end (SIGTERM)
        self.ended = False
        self._launched = 0  # processes of ranks so far: the output of each may be left
        self._launcher = launcher
        self._selector = selector
        self._display = display
        self._ungranted = {STDOUT: 0, STDERR: 0}  # bytes received for which no new room has been granted
        self._credit = INITIAL_CREDIT
        self._spares: set[int] = set()  # the lanes of all spares that were started
        self._ended_spares: set[int] = set()
        self._parts: set[TimelinePart] = set()  # of the timeline of an elastic job, which it has sent
        self._job: RemoteJob | None = None
        self._states: RemoteStates | None = None
        self._last_received = time.monotonic()
        self._behind = RelayedHosts(selector, self.send)

    def connect(
        self,
        command: Sequence[str],
        question: Mapping[str, Any],
        reaper: Reaper,
        over: RemoteHost | None = None,
    ) -> None:
        """Starts ssh or srun, here or on another host, and sends the question.

        Raises OSError if it cannot be started here.
        """
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_err, theirs_err = os.pipe()
        try:
            environment, streams = self._launcher.environment(os.environ), (theirs_in, theirs_out, theirs_err)
            self._process: AgentProcess = (
                Process(command, environment, reaper, streams)
                if over is None
                else over._behind.start(command, streams)
            )
        finally:
            for descriptor in (theirs_in, theirs_out, theirs_err):
                os.close(descriptor)
        self._errors = self._display.read_host(self.name, ours_err)
        lines = "read" if self._launcher.forwards_lines else ""
        self._login = LoginOutput()
        self._channel = Channel(
            ours_out, ours_in, self._selector, self._receive, Sender.AGENT, self._login, lines
        )
        self._channel.send(Frame.of(MessageKind.ASK, question))

    def start(self, values: Mapping[str, Any], job: RemoteJob) -> None:
        """Orders the agent to start its ranks."""
        self._job = job
        self._launched = len(job.ranks)
        if job.states is not None:
            with contextlib.suppress(OSError):  # a program that cleans temporary files has removed the folder
                states = held_folder(job.states.parent, self) / job.states.name
                self._states = RemoteStates(self.name, states, self.send)
        self.send(Frame.of(MessageKind.START, values))

    def launch(self, rank: RemoteRank, values: Mapping[str, Any]) -> None:
        """Orders the agent to start a rank, which replaces any ended rank of the same number."""
        assert self._job is not None
        self._job.ranks[rank.rank] = rank
        self._launched += 1
        self.send(Frame.of(MessageKind.LAUNCH, values, rank.rank))

    def start_spare(self, lane: int, values: Mapping[str, Any]) -> None:
        """Orders the agent to start a spare; the job's `spares` receive its reports."""
        self._spares.add(lane)
        self.send(Frame.of(MessageKind.SPARE, values, lane))

    def dismiss_spare(self, lane: int) -> None:
        """Orders the agent to dismiss a spare."""
        self.send(Frame(MessageKind.DISMISS, lane))

    def note_signal(self, number: int) -> None:
        """Sends the agent a signal that stops or resumes the job; its lease stops even if it has no rank."""
        if self._job is not None:
            self.send(Frame(MessageKind.SIGNAL, number=number))

    def renew_lease(self) -> None:
        """Starts a new lease: hvdrun itself was stopped, and so were the ranks."""
        self.forgive_silence()
        if self._job is not None and self._job.lease is not None:
            self._job.lease.resume(lease_clock())

    def forgive_silence(self) -> None:
        """Resets the time since the agent was last heard: hvdrun itself was stopped."""
        self._last_received = time.monotonic()

    def flush(self) -> None:
        """Forwards queued input to an agent behind a relay: hvdrun is about to be stopped."""
        while isinstance(self._process, RelayedProcess) and self._process.pass_on():
            pass

    def send(self, frame: Frame) -> None:
        if not self.ended:
            self._channel.send(frame)

    def collect(self) -> None:
        """Requests failure reports as soon as they exist, because the job has failed."""
        self.send(Frame(MessageKind.COLLECT))

    def finish(self) -> None:
        """Orders the agent to send the ranks' remaining files and to end: all ranks have ended."""
        self._end_states()
        self._credit = INITIAL_CREDIT + (self._launched + len(self._spares)) * FINAL_CREDIT
        self.send(Frame(MessageKind.FINISH))

    def poll(self) -> None:
        """Checks whether the connection has ended; grants the agent more output, if it can be shown."""
        if self.ended:
            return
        is_silent = self.answer is not None and self._deadline <= time.monotonic()
        if is_silent and not self._channel.read():  # hvdrun itself may have been stopped for a while
            self.silent_since = self._last_received
            self.give_up(f"its agent has sent nothing for {time.monotonic() - self._last_received:.0f} s")
        if result := self._process.poll():
            self._channel.read_rest()
            self._end(*result)
        elif self._channel.ended and not self.done:  # malformed data, or the agent closed its end
            self._process.signal(signal.SIGTERM)
        for number, ungranted in self._ungranted.items():
            if ungranted >= INITIAL_CREDIT // 4 and self._display.has_room(number):
                self._ungranted[number] = 0
                self.send(Frame(MessageKind.GRANT, number, number=ungranted))
        if self._states is not None:
            self._states.poll(time.monotonic())
        self._channel.watch(self._behind.balance(self._channel.backlog))

    @property
    def deadline(self) -> float | None:
        """Returns when to call `poll`, whatever happens."""
        if self.ended or self._states is None:
            return None if self.ended else self._deadline
        return min(self._deadline, self._states.due)

    @property
    def _deadline(self) -> float:
        lease = self._job.lease if self._job is not None else None
        silence = self._last_received + SILENCE_SECONDS
        if self.silent_since is not None:  # it was given up, and its end is awaited
            silence = time.monotonic() + 1.0
        return silence if lease is None else min(silence, time.monotonic() + lease.end - lease_clock())

    def give_up(self, reason: str) -> None:
        """Ends the connection; the agent will notice, and end its ranks."""
        self.failure = self.failure or reason
        self._process.signal(signal.SIGKILL)

    def mute(self) -> None:
        """Shows nothing that ssh or srun says: it has said the same before."""
        self._errors.shown = False

    def give_up_waiting(self, seconds: float) -> None:
        """Ends the connection, because there was no answer for that long."""
        text = f"{self.name} has not answered in {seconds:g} s: is the login there slow? "
        self.give_up(f"{text}Try `{self._launcher.trial(self.name)}`")

    @property
    def lease_left(self) -> float:
        """Returns for how many seconds ranks may still run there, if nothing is heard from it.

        A lease that never ends (a heartbeat of 0) tells nothing: an ordinary silence has to do.
        """
        if self._job is None or self._job.lease is None:
            return 0.0
        left = max(self._job.lease.end - lease_clock(), 0.0)
        return left if left < math.inf else SILENCE_SECONDS

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()
        self._process.clear()

    def _receive(self, frame: Frame) -> None:
        self._last_received = time.monotonic()
        if frame.kind == MessageKind.ANSWER:
            self._take_answer(frame)
        elif frame.kind == MessageKind.DONE:
            self.done = True
            self._channel.close_writing()
        elif frame.kind in _FROM_RELAY:
            self._behind.take(frame)
        elif frame.kind == MessageKind.ALIVE:
            self._renew(frame.number)
        elif frame.kind == MessageKind.LEAVING:
            self.leaves = True
        elif frame.kind == MessageKind.STATE and self._job is not None and self._job.states is not None:
            if self._states is not None:  # else the job ends
                self._states.take(frame)
        elif frame.kind == MessageKind.WORKER_TIMELINE and self._job is not None:
            self._store_part(frame, self._job)
        elif self._job is not None and self._job.spares is not None and frame.rank in self._spares:
            self._take_of_spare(frame, self._job.spares)
        elif self._job is None or frame.rank not in self._job.ranks:
            raise WireError(f"{frame.kind.name} of rank {frame.rank} is not expected")
        else:
            self._take(frame, self._job, self._job.ranks[frame.rank])

    def _renew(self, number: int) -> None:
        if self._job is not None:
            self.accepted = True
            if self._job.lease is not None:
                self._job.lease.grant(lease_clock())
            if self._channel.backlog < _MOST_UNREAD:  # an agent that does not read gets no leases
                self.send(Frame(MessageKind.LEASE, 0, number=number))

    def _take_answer(self, frame: Frame) -> None:
        answer = frame.values
        version = one_line(str(answer.get("version", "")), 50)
        problem = one_line(str(answer.get("problem", "")), 1000)
        if version != VERSION:
            problem = f"has sirtaki {version}, and this host {VERSION}: install the same version on both"
        if problem:
            self.failure = f"{self.name} {problem}"
        gpus = answer.get("gpus")
        self.answer = {"gpus": gpus if isinstance(gpus, int) and 0 <= gpus <= 1024 else 0}
        if "torch" in answer:
            try:
                self.master_offer = MasterOffer.parse(answer["torch"])
            except ValueError as error:
                raise frame.malformed(error) from None

    def _take(self, frame: Frame, job: RemoteJob, rank: RemoteRank) -> None:
        if frame.kind in (MessageKind.STDOUT, MessageKind.STDERR):
            self._take_output(frame)
        elif frame.kind == MessageKind.STARTED and rank.is_awaited:
            rank.pid = frame.number
            self._display.end_lines(frame.rank)
            job.on_start(frame.rank, rank.pid)
        elif frame.kind == MessageKind.REFUSED and rank.is_awaited:
            self._display.say(f"{self.name}: {one_line(frame.text, 1000)}")
            self._note_exit(rank, NOT_EXECUTABLE, 0)
        elif frame.kind == MessageKind.ENDED:
            code, killed_by = frame.fields(code=int, killed_by=int)
            if not (0 <= code <= 255 and 0 <= killed_by <= 255):
                raise frame.malformed()
            self._note_exit(rank, code, killed_by)
        elif frame.kind == MessageKind.REPORT and job.post_mortem is not None:
            job.post_mortem.store_report(frame.rank, frame.payload)
        elif frame.kind == MessageKind.TIMELINE and job.lease is None and job.timeline is not None:
            job.timeline.append(frame.rank, frame.payload)
        else:
            raise frame.unexpected()

    def _store_part(self, frame: Frame, job: RemoteJob) -> None:
        if job.lease is None or job.timeline is None or frame.rank < 0:
            raise WireError(f"{frame.kind.name} of worker {frame.rank} is not expected")
        part = TimelinePart(frame.rank, frame.number)
        self._parts.add(part)
        if len(self._parts) > _MOST_PARTS:
            raise WireError(f"it sent more than {_MOST_PARTS} parts of a timeline")
        job.timeline.append_part(part, frame.payload)

    def _take_of_spare(self, frame: Frame, spares: SpareNews) -> None:
        if frame.kind in (MessageKind.STDOUT, MessageKind.STDERR):
            self._take_output(frame)
        elif frame.kind == MessageKind.STARTED:
            spares.started(frame.rank, frame.number)
        elif frame.kind == MessageKind.SPARE_WAITS:
            spares.waits(frame.rank, *frame.fields(modules=int, seconds=float))
        elif frame.kind == MessageKind.SPARE_ENDED and frame.rank not in self._ended_spares:
            self._ended_spares.add(frame.rank)
            spares.ended(frame.rank, one_line(frame.text, 1000))
        else:
            raise frame.unexpected()

    def _take_output(self, frame: Frame) -> None:
        number = STDOUT if frame.kind == MessageKind.STDOUT else STDERR
        self._ungranted[number] += len(frame.payload)
        if self._ungranted[number] > self._credit:
            raise WireError(f"it sent more output than the {self._credit} bytes there was room for")
        self._display.take(frame.rank, number, frame.payload)

    def _note_exit(self, rank: RemoteRank, code: int, killed_by: int, lost: str = "") -> bool:
        is_new = rank.note(ExitStatus(rank.rank, code, killed_by, self.name, lost))
        if self._job is not None:
            self._job.on_exit()
        return is_new

    def _end(self, code: int, killed_by: int) -> None:
        self.ended = True
        self._end_states()
        self._channel.close_writing()
        self._behind.lose(f"{self.name} was lost, over whose agent it was reached")
        if self._job is None:
            self.failure = self.failure or self._describe_no_answer(code, killed_by)
            return
        if not self.done:
            self.failure = self.failure or self._describe_loss(code, killed_by)
        for rank in self._job.ranks.values():  # those of which the agent has reported no end
            self.lost |= self._note_exit(rank, 0, 0, self.failure or "hvdrun's agent there has ended")

    def _end_states(self) -> None:
        if self._states is not None:
            self._states.end()
            self._states = None

    def _describe_no_answer(self, code: int, killed_by: int) -> str:
        if self._channel.error:
            advice = "its login shell must print nothing without a terminal"
            return f"{self.name}: {self._channel.error}: {advice}"
        if killed_by:
            return f"the {self._launcher.program} process for {self.name} was killed by signal {killed_by}"
        self._display.read_available(self._errors)
        said = [line.decode(errors="replace") for line in self._errors.tail]
        if code == 0 or not said:
            said += self._login.printed.decode(errors="replace").splitlines()
        return self._launcher.explain(self.name, code, said)

    def _describe_loss(self, code: int, killed_by: int) -> str:
        if isinstance(self._process, RelayedProcess) and self._process.lost:
            return self._process.lost
        if self._channel.error:
            return f"it sent malformed data ({self._channel.error})"
        if killed_by:
            return f"the {self._launcher.program} process for it was killed by signal {killed_by}"
        return self._launcher.explain_loss(code)


# ---- Hosts that hvdrun reaches over the agent of another host: hvdrun's side of `relays` ---------------


_READ_BYTES = 64 * 1024
_MAX_BACKLOG = 1024 * 1024  # bytes that wait for a reader; while there are more, nothing is read
_FROM_RELAY = (MessageKind.PASSED, MessageKind.PASSED_ERROR, MessageKind.PASSED_END)
_LOST = 255  # as ssh's exit code when a connection breaks


class AgentProcess(Protocol):
    """A process of ssh or srun, here or on another host."""

    def poll(self) -> tuple[int, int] | None:
        """Returns how the process ended: its exit code, or 0 and the signal; None while it runs."""

    def signal(self, number: int) -> None:
        """Sends it a signal."""

    def clear(self) -> None:
        """Ends it, and forgets it."""


class RelayedProcess:
    """A process of ssh on another host; `send` sends frames to the agent of that host.

    The agent's side of its three streams is what the process would have here: the other ends do not differ.
    """

    def __init__(
        self,
        lane: int,
        command: Sequence[str],
        selector: selectors.BaseSelector,
        send: Callable[[Frame], None],
        streams: tuple[int, int, int],
    ) -> None:
        self.lost = ""  # why it is gone, if its agent is
        self._lane = lane
        self._selector = selector
        self._send = send
        self._result: tuple[int, int] | None = None
        self._signals: set[int] = set()  # that were sent: they all end it
        self._input = os.dup(streams[0])
        self._output, self._errors = (Outgoing(os.dup(stream), selector) for stream in streams[1:])
        os.set_blocking(self._input, False)
        self._watched = False
        self.watch(True)
        send(Frame.of(MessageKind.REACH, {"command": list(command)}, lane))

    @property
    def backlog(self) -> int:
        """Returns how many bytes of its output nobody has read yet."""
        return self._output.backlog

    def watch(self, wanted: bool) -> None:
        """Starts or stops forwarding the process's input."""
        wanted = wanted and self._input >= 0
        if wanted and not self._watched:
            self._selector.register(self._input, selectors.EVENT_READ, self.pass_on)
        elif self._watched and not wanted:
            self._selector.unregister(self._input)
        self._watched = wanted

    def poll(self) -> tuple[int, int] | None:
        """Returns how the process ended, once all that it has written to its output can be read."""
        return None if self._output.backlog else self._result

    def signal(self, number: int) -> None:
        if self._result is None and number not in self._signals:
            self._signals.add(number)
            self._send(Frame(MessageKind.DROP, self._lane, number=number))

    def clear(self) -> None:
        self._close_input()
        self._output.close()
        self._errors.close()

    def take(self, frame: Frame) -> None:
        """Handles a frame from the agent: output, or the end of the process."""
        if frame.kind == MessageKind.PASSED:
            self._output.send(frame.payload)
        elif frame.kind == MessageKind.PASSED_ERROR:
            if self._errors.backlog < _MAX_BACKLOG:  # the rest is dropped: hvdrun's output may have no reader
                self._errors.send(frame.payload)
        else:
            self._end(*frame.fields(code=int, killed_by=int))

    def lose(self, why: str) -> None:
        """Records that the agent is gone."""
        if self._result is None:
            self.lost = why
            self._end(_LOST, 0)

    def _end(self, code: int, killed_by: int) -> None:
        self._result = code, killed_by
        self._close_input()
        self._output.finish()
        self._errors.finish()

    def pass_on(self) -> bool:
        """Forwards some input; returns False if there is none."""
        if self._input < 0:  # closed by an earlier event
            return False
        try:
            data = os.read(self._input, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._send(Frame(MessageKind.PASS, self._lane, data))
        else:
            self._send(Frame(MessageKind.PASS_END, self._lane))
            self._close_input()
        return bool(data)

    def _close_input(self) -> None:
        if self._input >= 0:
            self.watch(False)
            os.close(self._input)
            self._input = -1


class RelayedHosts:
    """The processes of ssh that a host's agent holds, by their lanes. `send` sends a frame to the agent."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Frame], None]) -> None:
        self._selector = selector
        self._send = send
        self._lanes: dict[int, RelayedProcess] = {}

    def start(self, command: Sequence[str], streams: tuple[int, int, int]) -> RelayedProcess:
        """Starts a process on the agent's host, attached to `streams`."""
        lane = len(self._lanes)
        self._lanes[lane] = RelayedProcess(lane, command, self._selector, self._send, streams)
        return self._lanes[lane]

    def take(self, frame: Frame) -> None:
        """Handles a frame from the agent. Raises WireError if it belongs to no process."""
        process = self._lanes.get(frame.rank)
        if process is None:
            raise WireError(f"{frame.kind.name} of lane {frame.rank} is not expected")
        process.take(frame)

    def balance(self, backlog: int) -> bool:
        """Forwards input while the agent reads it; returns whether its output has room.

        `backlog` is the number of bytes that wait for the agent.
        """
        for process in self._lanes.values():
            process.watch(backlog < _MAX_BACKLOG)
        return all(process.backlog < _MAX_BACKLOG for process in self._lanes.values())

    def lose(self, why: str) -> None:
        """Records that the agent is gone, and with it all its processes."""
        for process in self._lanes.values():
            process.lose(why)
