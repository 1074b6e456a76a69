"""The main loop of hvdrun, which static and elastic jobs share: output, signals, deadlines, and the end."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from sirtaki.runner.launch.starter import JobStarter
from sirtaki.runner.observe.endpoints import Endpoints
from sirtaki.runner.supervise.signals import PASSED_ON, stop_this_process

if TYPE_CHECKING:
    from sirtaki.runner.hosts.remote import RemoteHost

KILL_SECONDS = 5.0  # between the signal that asks the processes to end and SIGKILL
RESULT_SECONDS = 1.0  # for the result to be read after a signal that comes when all processes have ended
READER_GONE = 141  # a shell's exit code for a program killed by SIGPIPE


class Pollable(Protocol):
    """A file with a descriptor."""

    def fileno(self) -> int: ...


class Patience:
    """The user's patience after all processes have ended.

    The first signal ends the wait for their output, the second signal the wait for hvdrun's result.
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


class MainLoop:
    """The main loop. A subclass implements what depends on the kind of job.

    Attributes:
        selector: of all descriptors; when one is ready, the loop calls the `data` of its key.
        endpoints: the servers that hvdrun has started.
        patience: the user's, after all processes have ended.
        kill_at: when to kill the processes that remain of a job that ends (time.monotonic()).
    """

    def __init__(self, starter: JobStarter) -> None:
        self.starter, self.settings = starter, starter.settings
        self.display, self.selector = starter.display, starter.selector
        self.wakeup, self.reaper = starter.wakeup, starter.reaper
        self.endpoints = Endpoints(starter.folder.path, starter.reaper, starter.display.say)
        self.patience = Patience()
        self.kill_at: float | None = None

    def run_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.display.balance()
            for handle in self._ready():
                handle()
            if (error := self.display.reader_error) and self.kill_at is None:
                is_closed = isinstance(error, BrokenPipeError)
                text = "" if is_closed else f"cannot write to standard output: {error.strerror}"
                self.stop(READER_GONE if is_closed else 1, text, signal.SIGTERM)
            self.advance()
            if self.kill_at is not None and self.kill_at <= time.monotonic():
                self._kill()

    def begin(self) -> None:
        """Handles signals from now on: all that has to be started undisturbed has been."""
        self.selector.register(self.wakeup, selectors.EVENT_READ, self._handle_wakeup)
        self.wakeup.unblock_signals()

    def conclude(self, show_result: Callable[[], None]) -> None:
        """Waits for the reaper and for the output; `show_result` shows what is said last."""
        self.reaper.release()
        self.run_until(lambda: self.reaper.ended() or self.patience.has_ended)
        for remote in self.remotes():
            remote.close()
        self.display.close_streams()
        self.display.begin_result(drops_output=self.patience.has_ended)
        show_result()
        self.run_until(lambda: self.display.all_shown or self.patience.is_over())

    def await_hosts(self) -> None:
        """Waits until the agents, which have been ordered to end, have sent the last output."""
        self.run_until(lambda: all(remote.ended for remote in self.remotes()) or self.patience.has_ended)

    def show_error_of(self, number: int, lane: int, name: str, died: bool) -> str:
        """Shows or returns, as the display's method, the error of the process that explains a failure.

        Does neither for a process whose own outcome the service has: it is `number` there.
        """
        service = self.settings.service
        if service is not None and service.has_outcome(number):
            return ""
        return self.display.show_error_of(lane, name, died)

    def show_last(self, text: str, reason: str, has_failed: bool, culprit: int | None) -> None:
        """Shows the last line of the job, with its `reason`; none if `text` is "".

        The service receives that of a failed job instead.
        """
        text = text and f"{text}{reason and ': '}{reason}"
        if has_failed and self.settings.service is not None:
            self.settings.service.note_failure(text, culprit)
        elif text:
            self.display.say(text)

    # ---- What depends on the kind of job ---------------------------------------------------------------

    def sources(self) -> Sequence[Pollable]:
        """Returns descriptors that wake the loop, so that `advance` handles them."""
        return ()

    def moments(self) -> Sequence[float | None]:
        """Returns when to call `advance`, whatever happens (time.monotonic())."""
        raise NotImplementedError

    def advance(self) -> None:
        """Polls the other hosts, and performs all due actions: what was ready has been handled."""
        raise NotImplementedError

    def note_changes(self) -> None:
        """Handles messages and ends of processes: something has woken the loop."""
        raise NotImplementedError

    def remotes(self) -> Sequence[RemoteHost]:
        """Returns the connections to other hosts."""
        raise NotImplementedError

    def running(self) -> Sequence[int]:
        """Returns the running processes by the numbers under which they are shown, the lowest first."""
        raise NotImplementedError

    def has_ended(self) -> bool:
        """Returns whether all processes of the job have ended."""
        return not self.running()

    def count(self) -> str:
        """Returns how many processes are running, as hvdrun names them."""
        return "all ranks"

    def signal(self, number: int) -> None:
        """Sends a signal to all processes."""
        raise NotImplementedError

    def stop(self, code: int, text: str, number: int) -> None:
        """Ends the job by a signal. hvdrun's exit code is `code`, its last line `text` ("" for none)."""
        raise NotImplementedError

    def ask_to_end(self, number: int) -> None:
        """Sends all processes signal `number`, which asks them to end."""
        self.signal(number)
        self.signal(signal.SIGCONT)  # a stopped process does not handle signals

    # ---- Signals to hvdrun -----------------------------------------------------------------------------

    def _handle_wakeup(self) -> None:
        numbers = self.wakeup.read()
        if self.reaper.replace_if_killed():
            self.display.say("the process that cleans up after this job was killed; another one replaces it")
        self.endpoints.check()
        self.note_changes()
        for number in numbers:
            self._handle_signal(number)

    def _handle_signal(self, number: int) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self._terminate(number)
        elif number == signal.SIGTSTP:
            self._pass_on(number)
            for remote in self.remotes():
                remote.flush()
            stop_this_process()
            for remote in self.remotes():
                remote.renew_lease()
        elif number == signal.SIGCONT or number in PASSED_ON:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Sends a signal to all processes, and to all agents, which may have no running process left."""
        self.signal(number)
        for remote in self.remotes():
            remote.note_signal(number)

    def _terminate(self, number: int) -> None:
        if self.has_ended():
            self.patience.note_signal()
            self.display.drop()
        elif self.kill_at is not None:
            self._kill()
        elif number == signal.SIGTERM:
            self.stop(128 + number, f"terminated (SIGTERM): ending {self.count()}", number)
        else:
            self.display.say(f"interrupted: ending {self.count()} (Ctrl-C again kills them at once)")
            self.display.mute_errors_except(min(self.running(), default=0))
            self.stop(128 + number, "", number)

    def _kill(self) -> None:
        self.kill_at = time.monotonic() + KILL_SECONDS
        self.signal(signal.SIGKILL)

    def _ready(self) -> list[Callable[[], object]]:
        """Waits for the next event or deadline; returns the handlers of all that is ready."""
        sources = self.sources()
        for source in sources:
            self.selector.register(source, selectors.EVENT_READ, lambda: None)
        ready = [key.data for key, _ in self.selector.select(self._seconds_left())]
        for source in sources:
            self.selector.unregister(source)
        return ready

    def _seconds_left(self) -> float | None:
        """Returns the time to the next deadline."""
        moments = [self.kill_at, self.patience.due, *self.moments()]
        moments += [remote.deadline for remote in self.remotes()]
        known = [moment for moment in moments if moment is not None]
        return max(min(known) - time.monotonic(), 0.0) if known else None
