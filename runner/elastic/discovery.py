"""Runs the user's discovery script every second, without waiting for it.

A failure or nonsense at the first run ends the job; later, such an answer changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sirtaki.runner.elastic.actions import Slot
from sirtaki.runner.elastic.settings import slots_of
from sirtaki.runner.errors import LaunchError
from sirtaki.runner.hosts import parse_hosts
from sirtaki.runner.own_host import with_own_host
from sirtaki.runner.rendezvous.wire import printable

_PAUSE_SECONDS = 1.0  # between two runs
_LIMIT_SECONDS = 10.0  # for one run
_POLL_SECONDS = 0.05  # no event announces that the script has ended
_LONGEST_OUTPUT = 1 << 20  # bytes


class Discovery:
    """The script of a job, if it has one. `say` shows a line, when an answer cannot be used."""

    def __init__(self, script: Path | None, slots_per_host: int | None, say: Callable[[str], None]) -> None:
        self._script = script
        self._slots_per_host = slots_per_host or 1
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this
        self._runs = False  # a run has been started, and its answer not been taken
        self._cannot_run = ""
        self._started = 0.0
        self._complaint = ""  # shown once
        self._text, self._slots = "", list[Slot]()  # the last answer that could be used
        self.due: float | None = None if script is None else 0.0  # when to call `poll` (time.monotonic())

    def first(self) -> Sequence[Slot]:
        """Runs the script, and returns the slots. Raises LaunchError."""
        self._start(time.monotonic())
        while (answer := self._answer(time.monotonic())) is None:
            time.sleep(_POLL_SECONDS)
        if isinstance(answer, str):
            raise LaunchError(f"the host discovery script {self._script} {answer}")
        return answer

    def poll(self, now: float) -> Iterator[Sequence[Slot]]:
        """Yields the slots if a run has ended well; starts the next run when it is due."""
        if self.due is None or now < self.due:
            return
        if not self._runs:
            self._start(now)
        elif (answer := self._answer(now)) is None:
            self.due = now + _POLL_SECONDS
        elif isinstance(answer, str):
            if answer != self._complaint:
                self._complaint = answer
                self._say(f"the host discovery script {answer}; the hosts stay as they are")
        else:
            self._complaint = ""
            yield answer

    def close(self) -> None:
        """Ends a run in progress."""
        self.due = None
        if self._process is not None:
            _kill(self._process)
        self._output.close()

    def _start(self, now: float) -> None:
        self._output.seek(0)
        self._output.truncate()
        self._runs = True
        try:
            self._process = subprocess.Popen(
                [str(self._script)], stdin=subprocess.DEVNULL, stdout=self._output, start_new_session=True
            )
        except OSError as error:
            self._cannot_run = f"cannot be run: {error.strerror}"
        self._started, self.due = now, now + _POLL_SECONDS

    def _answer(self, now: float) -> Sequence[Slot] | str | None:
        """Returns the slots, or why there are none; None while the script runs."""
        process = self._process
        if process is None:
            return self._ended(now, self._cannot_run)
        if (code := process.poll()) is None:
            if now < self._started + _LIMIT_SECONDS:
                return None
            _kill(process)
            return self._ended(now, f"has not ended within {_LIMIT_SECONDS:g} s")
        if code:
            what = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            )
            return self._ended(now, what)
        self._output.seek(0)
        text = self._output.read(_LONGEST_OUTPUT).decode(errors="replace")
        return self._ended(now, self._parse(text))

    def _ended(self, now: float, answer: Sequence[Slot] | str) -> Sequence[Slot] | str:
        self._process, self._runs = None, False
        self.due = now + _PAUSE_SECONDS
        return answer

    def _parse(self, text: str) -> Sequence[Slot] | str:
        if text == self._text:
            return self._slots  # without a look-up of names, which may take seconds
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            return []
        try:
            self._slots = slots_of(with_own_host(parse_hosts(",".join(lines))), self._slots_per_host)
        except LaunchError as error:
            return f"has printed something that cannot be used: {printable(str(error), 300)}"
        self._text = text
        return self._slots


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the script, and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
