"""The main loop of hvdrun: handles ranks, output, signals and the rendezvous until all ranks have ended."""

from __future__ import annotations

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sirtaki._core.bootstrap.messages import StoreEvent, describe
from sirtaki._core.bootstrap.store_server import StoreServer

from .culprit import Inquiry, Verdict
from .display import Display
from .epilogue import Epilogue
from .guard import Guard
from .process import Rank
from .progress import Progress
from .room import Room
from .signals import Bell, stop_this_process
from .stragglers import Stragglers

if TYPE_CHECKING:  # not needed on a single host
    from .remote import RemoteHost

INQUIRY_SECONDS = 0.5  # after the first failure, so that the rank that caused it can be identified
REPORT_POLL_SECONDS = 0.01  # no event announces that a rank has written its report
KILL_SECONDS = 5.0  # between the signal that asks the ranks to end and SIGKILL
INTERRUPTED, TERMINATED = "was interrupted", "was terminated"  # the fate of the job
READER_GONE = 141  # a shell's exit code for a program killed by SIGPIPE


class Mailbox:
    """Messages from other threads to the main loop."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._events: deque[StoreEvent] = deque()

    def put(self, event: StoreEvent) -> None:
        self._events.append(event)
        self._bell.ring()

    def empty(self) -> list[StoreEvent]:
        return [self._events.popleft() for _ in range(len(self._events))]


class Supervisor:
    """Runs a job whose ranks have been started to its end."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        hosts: Sequence[RemoteHost],
        display: Display,
        selector: selectors.BaseSelector,
        inquiry: Inquiry,
        server: StoreServer,
        epilogue: Epilogue,
        progress: Progress,
    ) -> None:
        self._ranks = ranks
        self._hosts = hosts  # the hosts other than this one
        self._display = display
        self._selector = selector
        self._inquiry = inquiry
        self._server = server
        self._epilogue = epilogue
        self._progress = progress
        self._stragglers = Stragglers(display.say)
        self._verdict: Verdict | None = None  # set once it is certain that the job has failed
        self._decide_at: float | None = None
        self._kill_at: float | None = None
        self._room: Room | None = None  # for the ranks of this host, while they start
        self._hurry = False  # whether the user refuses to wait for remaining output

    def watch_memory(self, room: Room, seconds: float) -> None:
        """Aborts the job if its start uses up this host's memory. Must be called before `run`."""
        self._room = room
        room.watch(seconds)

    def run(self, bell: Bell, mailbox: Mailbox, guard: Guard) -> int:
        """Runs the loop; returns hvdrun's exit code when all descendants have ended and all is shown."""
        self._selector.register(bell, selectors.EVENT_READ, lambda: self._listen(bell, mailbox, guard))
        bell.listen()
        self._listen(bell, mailbox, guard)
        self._turn_until(lambda: all(rank.ending for rank in self._ranks))
        self._server.close()
        self._conclude(mailbox)
        self._part_with_hosts()
        for rank in self._ranks:
            rank.bury()
        failed = self._verdict is not None and self._inquiry.failed
        last_words = self._epilogue.lines(self._verdict.event if self._verdict and failed else "")
        guard.release()
        self._turn_until(lambda: guard.ended() or self._hurry)
        for host in self._hosts:
            host.close()
        self._display.close_streams()
        self._pronounce(last_words)
        self._turn_until(lambda: self._display.all_shown or self._hurry)
        return self._verdict.exit_code if self._verdict else 0

    def _conclude(self, mailbox: Mailbox) -> None:
        for event in mailbox.empty():
            self._inquiry.note_event(event)
        if self._verdict is None and self._inquiry.failed:
            self._verdict = self._judge()
        self._decide_at = self._kill_at = None
        self._progress.end()
        self._stragglers.end()

    def _part_with_hosts(self) -> None:
        """Lets the agents send their ranks' remaining files, and end."""
        for host in self._hosts:
            host.finish()
        self._turn_until(lambda: all(host.ended for host in self._hosts) or self._hurry)
        for host in self._hosts:
            if not (host.done or host.lost or self._hurry):
                self._display.say(f"the last words of ranks on {host.name} may be missing: {host.failure}")

    def _turn_until(self, over: Callable[[], bool]) -> None:
        while not over():
            self._display.balance()
            for key, _ in self._selector.select(self._time_to_next_deadline()):
                key.data()
            for host in self._hosts:
                host.tend()
            if error := self._display.reader_error:
                self._lose_reader(error)
            self._meet_deadlines()

    def _all_is_known(self) -> bool:
        """Returns whether the culprit is known, and all survivors have written what they were doing."""
        return self._inquiry.conclusive and self._epilogue.has_reports_of(self._inquiry.survivors)

    def _judge(self) -> Verdict:
        for rank, report in self._epilogue.read_reports().items():
            self._inquiry.note_report(rank, report)
        return self._inquiry.verdict()

    def _time_to_next_deadline(self) -> float | None:
        moments = [self._decide_at, self._kill_at, self._progress.due, self._stragglers.due]
        moments += [host.deadline for host in self._hosts]
        moments += [self._room.due] if self._room is not None else []
        deadlines = [moment for moment in moments if moment is not None]
        if self._decide_at is not None and self._inquiry.conclusive:
            deadlines.append(time.monotonic() + REPORT_POLL_SECONDS)
        return max(min(deadlines) - time.monotonic(), 0) if deadlines else None

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        if self._decide_at is not None and (self._decide_at <= now or self._all_is_known()):
            self._end(self._judge(), signal.SIGTERM)
        if self._kill_at is not None and self._kill_at <= now:
            self._kill()
        self._progress.meet(now)
        self._stragglers.meet(now, self._running())
        if self._room is not None and self._verdict is None and (shortage := self._room.meet(now)):
            self._end(Verdict(1, shortage), signal.SIGTERM)
            self._kill()

    def _listen(self, bell: Bell, mailbox: Mailbox, guard: Guard) -> None:
        numbers = bell.read()
        if guard.replace_if_killed():
            self._display.say("the process that cleans up after this job was killed; another one replaces it")
        for event in mailbox.empty():
            tell = self._display.say if event.kind == "refused" else self._display.detail
            tell(f"the rendezvous reports that {describe(event)}")
            self._inquiry.note_event(event)
            self._note_arrival(event)
        for rank in self._ranks:
            if ending := rank.check():
                self._inquiry.note_ending(ending)
                self._display.detail(f"rank {ending.rank} has ended with exit code {ending.exit_code}")
                if not ending.failed:
                    self._stragglers.note_ending()
                    self._server.rank_ended(ending.rank, self._inquiry.how_it_ended(ending.rank))
        if self._inquiry.failed and self._verdict is None and self._decide_at is None:
            self._decide_at = time.monotonic() + INQUIRY_SECONDS
            self._progress.end()
            self._stragglers.end()
            for host in self._hosts:
                host.collect()
        for number in numbers:
            self._obey(number)

    def _note_arrival(self, event: StoreEvent) -> None:
        if event.kind == "initialised" and self._room is not None:
            self._room.note_initialised(event.rank)
        if event.kind == "arrived" and event.generation <= 1:
            self._progress.begin()
            self._progress.note(event.rank)

    def _running(self) -> list[int]:
        return [rank.rank for rank in self._ranks if not rank.ending]

    def _obey(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self._give_up(number)
        elif number == signal.SIGTSTP:
            self._signal_ranks(number)
            stop_this_process()
        elif number in (signal.SIGCONT, signal.SIGHUP):
            self._signal_ranks(number)

    def _give_up(self, number: int) -> None:
        running = self._running()
        if not running:
            self._hurry = True
            self._display.drop()
        elif self._verdict is not None:
            self._kill()
        elif number == signal.SIGTERM:
            self._end(
                Verdict(128 + number, f"terminated (SIGTERM): ending {_count(running)}", event=TERMINATED),
                number,
            )
        else:
            self._display.say(f"interrupted: ending {_count(running)} (Ctrl-C again kills them at once)")
            self._display.mute_errors_except(running[0])
            self._end(Verdict(128 + number, event=INTERRUPTED), number)

    def _lose_reader(self, error: OSError) -> None:
        if self._verdict is None:
            broken = isinstance(error, BrokenPipeError)
            text = "" if broken else f"cannot write to standard output: {error.strerror}"
            self._end(Verdict(READER_GONE if broken else 1, text), signal.SIGTERM)

    def _end(self, verdict: Verdict, number: int) -> None:
        """Asks all ranks to end, and kills those that do not."""
        self._verdict = verdict
        self._decide_at = None
        self._kill_at = time.monotonic() + KILL_SECONDS
        self._signal_ranks(number)
        self._signal_ranks(signal.SIGCONT)  # a stopped process does not handle signals

    def _kill(self) -> None:
        self._kill_at = None
        self._signal_ranks(signal.SIGKILL)

    def _signal_ranks(self, number: int) -> None:
        self._inquiry.note_signal(number)
        for rank in self._ranks:
            rank.signal(number)

    def _pronounce(self, last_words: Sequence[str]) -> None:
        verdict = self._verdict
        reason = ""
        if verdict is not None and verdict.rank is not None:
            reason = self._display.show_error_of(verdict.rank)
        for line in last_words:
            self._display.say(line)
        if verdict is None and (notice := self._inquiry.notice):
            self._display.say(notice)
        if verdict is not None and verdict.text:
            self._display.say(f"{verdict.text}{reason and ': '}{reason}")


def _count(running: Sequence[int]) -> str:
    return "1 rank" if len(running) == 1 else f"{len(running)} ranks"
