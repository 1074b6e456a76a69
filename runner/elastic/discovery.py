"""Runs the user's discovery script every second, without waiting for it or for look-ups of its hosts' names.

A failure or nonsense at the first run ends the job; later, such an answer changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sirtaki.bindings.bootstrap.connection.wire import printable
from sirtaki.runner.cli.command import module_words
from sirtaki.runner.elastic.arbiter.model import Slot
from sirtaki.runner.elastic.settings import slots_of
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.hosts import OWN_HOST, Host, merge_own, parse_hosts

_PAUSE_SECONDS = 1.0  # between two runs
_LIMIT_SECONDS = 10.0  # for one run
_POLL_SECONDS = 0.05  # no event announces that the script has ended
_LONGEST_OUTPUT = 1 << 20  # bytes
_UNUSABLE = "has printed something that cannot be used"


class Discovery:
    """Runs a job's host discovery script, if there is any; `say` shows a line for an unusable answer."""

    def __init__(self, script: Path | None, slots_per_host: int | None, say: Callable[[str], None]) -> None:
        self._script = script
        self._slots_per_host = slots_per_host or 1
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: subprocess.Popen[bytes] | None = None  # a run that may not have ended yet
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this
        self._runs = False  # a run has been started, and its answer not been taken
        self._cannot_run = ""
        self._started = 0.0
        self._complaint = ""  # shown once
        self._hosts: Sequence[Host] | None = None  # those in the answer, while their names are looked up
        self._names = NameLookup()
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
        self._names.close()
        if self._process is not None:
            _kill(self._process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._output.close()

    def _start(self, now: float) -> None:
        if self._killed is not None and self._killed.poll() is None:
            self.due = now + _PAUSE_SECONDS
            return
        self._killed = None
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
        """Returns the slots, or why there are none; None while the script or a look-up runs."""
        if self._hosts is not None:
            return self._resolve(self._hosts, now)
        process = self._process
        if process is None:
            return self._ended(now, self._cannot_run)
        if (code := process.poll()) is None:
            if now < self._started + _LIMIT_SECONDS:
                return None
            _kill(process)
            self._killed = process
            return self._ended(now, f"has not ended within {_LIMIT_SECONDS:g} s")
        if code:
            what = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            )
            return self._ended(now, what)
        self._process = None
        self._output.seek(0)
        text = self._output.read(_LONGEST_OUTPUT).decode(errors="replace")
        try:
            self._hosts = self._parse(text)
            self._names.start([host.name for host in self._hosts], now)
        except LaunchError as error:
            return self._ended(now, f"{_UNUSABLE}: {printable(str(error), 300)}")
        except OSError as error:
            return self._ended(now, f"has printed names that cannot be looked up: {error.strerror}")
        return self._resolve(self._hosts, now)

    def _ended(self, now: float, answer: Sequence[Slot] | str) -> Sequence[Slot] | str:
        self._process, self._hosts, self._runs = None, None, False
        self.due = now + _PAUSE_SECONDS
        return answer

    def _parse(self, text: str) -> Sequence[Host]:
        """Returns the hosts in an answer. Raises LaunchError if it cannot be used."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return parse_hosts(",".join(lines)) if lines else []

    def _resolve(self, hosts: Sequence[Host], now: float) -> Sequence[Slot] | str | None:
        """Returns the slots of the hosts, or why there are none; None while names are looked up."""
        if not self._names.poll(now):
            return None
        try:
            return self._ended(now, slots_of(merge_own(hosts, self._names.is_own), self._slots_per_host))
        except LaunchError as error:
            return self._ended(now, f"{_UNUSABLE}: {printable(str(error), 300)}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the script, and all processes that it has started; does not wait for their end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# ---- Finds out which names of hosts mean this machine, without waiting for name servers ----------------


_COMMAND = (sys.executable, *module_words("sirtaki.runner.hosts.own_host"))
_LOOK_UP_SECONDS = 60.0  # for the names of one answer; those that were found by then are kept


class NameLookup:
    """The names that were looked up so far, each once in a job.

    One that could not be looked up counts as that of another machine, which perhaps only ssh knows, and is
    looked up again for the next answer.

    A process of its own looks them up: hvdrun's loop, which answers the leases of other hosts, must not wait,
    and has no threads, because it forks workers.
    """

    def __init__(self) -> None:
        self._is_own = {OWN_HOST: True}
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this
        self._started = 0.0

    def start(self, names: Iterable[str], now: float) -> None:
        """Starts a lookup of all names that are not yet known.

        Raises OSError if no process can be started.
        """
        unknown = dict.fromkeys(name for name in names if name not in self._is_own)
        if not unknown:
            return
        self._output.seek(0)
        self._output.truncate()
        with tempfile.TemporaryFile() as file:
            file.write("".join(f"{name}\n" for name in unknown).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                _COMMAND, stdin=file, stdout=self._output, stderr=subprocess.DEVNULL, start_new_session=True
            )
        self._started = now

    def poll(self, now: float) -> bool:
        """Returns whether the look-ups have ended; ends them when they take too long."""
        if self._process is None:
            return True
        if self._process.poll() is None:
            if now >= self._started + _LOOK_UP_SECONDS:
                self._process.kill()
            return False
        self._process = None
        self._take_results()
        return True

    def is_own(self, name: str) -> bool:
        """Returns whether a name is known to mean this machine."""
        return self._is_own.get(name, False)

    def close(self) -> None:
        """Ends look-ups in progress."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._output.close()

    def _take_results(self) -> None:
        self._output.seek(0)
        for line in self._output.read().decode(errors="replace").splitlines():
            is_own, _, name = line.partition(" ")
            self._is_own[name] = is_own == "1"
