"""Processes that hvdrun starts on its own host: each in a group of its own, and one of them for each rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Mapping, Sequence
from typing import Protocol

from .culprit import Ending
from .guard import Guard
from .signals import HANDLED, refuse_to_start_after_a_signal

_libc = ctypes.CDLL(None)  # opened before any fork
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_SECONDS = 0.1  # between looks for a signal while a program starts; on a busy machine that takes long


class Rank(Protocol):
    """What the supervisor needs of a rank, wherever it runs."""

    rank: int
    ending: Ending | None

    def check(self) -> Ending | None:
        """How the rank ended, if it has ended since the last look."""

    def signal(self, number: int) -> None:
        """Sends a signal to the rank and to all processes that it has started in its group."""

    def bury(self) -> None:
        """Lets the system forget the rank, which has ended."""


class Process:
    """A running process, which leads its own group.

    Remains a zombie until `bury`, so that the number of its process group cannot be reused.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        guard: Guard,
        streams: tuple[int, int, int],
    ) -> None:
        """Starts it with these standard streams; raises OSError if the system cannot run the program.

        `command` begins with the path of the program; by it Python finds the environment it belongs to.
        """
        self._buried = False
        failure, report_failure = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, environment, guard, parent, (*streams, report_failure))
        guard.note_group(self.pid)
        os.close(report_failure)
        with open(failure, "rb") as file:
            while not select.select([file], [], [], _LOOK_SECONDS)[0]:
                refuse_to_start_after_a_signal()
            error = file.read()  # ends when the program has replaced this one, or with the reason why not
        if error:
            os.waitpid(self.pid, 0)
            raise OSError(int(error), os.strerror(int(error)), command[0])

    def look(self) -> tuple[int, int] | None:
        """How it has ended: its exit code, or 0 and the signal that killed it. None while it runs."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return (result.si_status, 0) if result.si_code == os.CLD_EXITED else (0, result.si_status)

    def signal(self, number: int) -> None:
        """Sends a signal to the process and to all that it has started in its group."""
        if self._buried:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def bury(self) -> None:
        """Lets the system forget the process, which has ended."""
        if not self._buried:
            os.waitpid(self.pid, 0)
            self._buried = True


class RankProcess:
    """A running rank of this host. `stdout` and `stderr` are where what it writes can be read."""

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], guard: Guard
    ) -> None:
        """Starts the rank. Raises OSError as `Process` does, and LaunchError after a signal."""
        refuse_to_start_after_a_signal()
        self.rank = rank
        self.ending: Ending | None = None
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            self._process = Process(command, environment, guard, (nothing, stdout, stderr))
        except OSError:
            os.close(self.stdout)
            os.close(self.stderr)
            raise
        finally:
            for descriptor in (nothing, stdout, stderr):
                os.close(descriptor)
        self.pid = self._process.pid

    def check(self) -> Ending | None:
        """How the rank ended, if it has ended since the last look."""
        if self.ending is None and (result := self._process.look()):
            self.ending = Ending(self.rank, self.pid, *result)
            return self.ending
        return None

    def signal(self, number: int) -> None:
        """Sends a signal to the rank and to all processes that it has started in its group."""
        self._process.signal(number)

    def bury(self) -> None:
        """Lets the system forget the rank, which has ended."""
        self._process.bury()


def _become(
    command: Sequence[str],
    environment: Mapping[str, str],
    guard: Guard,
    parent: int,
    descriptors: tuple[int, int, int, int],
) -> None:
    """In the new process: becomes the program. Never returns.

    If `parent` ends, and the guard with it, the system still asks the program to end: prctl(2).
    """
    *streams, report_failure = descriptors
    try:
        os.setpgid(0, 0)
        guard.watch_group(os.getpid())
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended before that call
            os._exit(127)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, other programs should not
            signal.signal(number, signal.SIG_DFL)
        for number in HANDLED:  # what comes from here on is for this process, and not for hvdrun's bell
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        os.execve(command[0], list(command), environment)
    except OSError as error:
        os.write(report_failure, str(error.errno).encode())
    finally:
        os._exit(127)
