"""Processes that hvdrun, or an agent, starts on its own host, each in a process group."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.cli.command import module_words
from sirtaki.runner.launch.environment import RankEnvironment
from sirtaki.runner.launch.errors import CannotStart, LaunchError
from sirtaki.runner.launch.job_folder import JobFolder
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.supervise.failure_analysis import ExitStatus
from sirtaki.runner.supervise.signals import HANDLED, refuse_to_start_after_a_signal

_libc = ctypes.CDLL(None)  # opened before any fork
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TERMINAL = (0, 1, 2)  # the standard streams of this process
_POLL_SECONDS = 0.1  # between checks for a signal while a program starts; slow on a busy machine


class Rank(Protocol):
    """The supervisor's view of a rank, wherever it runs."""

    rank: int
    exit_status: ExitStatus | None

    def check(self) -> ExitStatus | None:
        """Returns how the rank ended, if it has ended since the last call."""

    def signal(self, number: int) -> None:
        """Sends a signal to all processes in the rank's process group."""

    def reap(self) -> None:
        """Reaps the rank, which has ended."""

    def clear(self) -> None:
        """Reaps the rank, and ends what it has left behind."""


class Process:
    """A running process, which leads its own group.

    Remains a zombie until `reap`, so that the number of its process group cannot be reused.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        reaper: Reaper,
        streams: tuple[int, int, int],
    ) -> None:
        """Starts the program with these standard streams; raises OSError if the system cannot run it.

        `command` begins with the path of the program, from which Python finds the environment it belongs to.
        """
        self._reaped = False
        self._reaper = reaper
        failure, report_failure = os.pipe()
        parent = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:  # the user has too many processes; an elastic job tries again
            os.close(failure)
            os.close(report_failure)
            raise
        if self.pid == 0:
            _exec(command, environment, reaper, parent, (*streams, report_failure))
        reaper.note_group(self.pid)
        os.close(report_failure)
        with open(failure, "rb") as file:
            events = select.poll()  # not select(), which takes no descriptors above 1023
            events.register(file, select.POLLIN)
            try:
                while not events.poll(_POLL_SECONDS * 1000):
                    refuse_to_start_after_a_signal()
            except LaunchError:
                self.clear()
                raise
            error = file.read()  # empty once the program has replaced the child, otherwise the errno
        if error:
            os.waitpid(self.pid, 0)
            raise OSError(int(error), os.strerror(int(error)), command[0])

    def poll(self) -> tuple[int, int] | None:
        """Returns how the process ended: its exit code, or 0 and the signal; None while it runs."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return (result.si_status, 0) if result.si_code == os.CLD_EXITED else (0, result.si_status)

    def signal(self, number: int) -> None:
        """Sends a signal to all processes in the process's group."""
        if self._reaped:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Reaps the process, which has ended."""
        if not self._reaped:
            os.waitpid(self.pid, 0)
            self._reaped = True

    def clear(self) -> None:
        """Kills what is left of the process's group, and forgets it: its number may be used again.

        Children of a rank may hold a GPU, which its successor needs.
        """
        if not self._reaped:
            self.signal(signal.SIGKILL)
            self.reap()
            self._reaper.forget_group(self.pid)


class RankProcess(Process):
    """A running rank of this host. `stdout` and `stderr` are the descriptors to read its output from.

    A rank that has the terminal uses this process's standard streams, in the foreground, until it ends; its
    output is not read.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        reaper: Reaper,
        has_terminal: bool = False,
    ) -> None:
        """Starts the rank. Raises OSError as `Process` does, and LaunchError after a signal."""
        refuse_to_start_after_a_signal()
        self.rank = rank
        self.exit_status: ExitStatus | None = None
        self._has_terminal = has_terminal
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        devnull = os.open(os.devnull, os.O_RDONLY)
        try:
            streams = _TERMINAL if has_terminal else (devnull, stdout, stderr)
            super().__init__(command, environment, reaper, streams)
        except (OSError, LaunchError):
            os.close(self.stdout)
            os.close(self.stderr)
            raise
        finally:
            for descriptor in (devnull, stdout, stderr):
                os.close(descriptor)

    def check(self) -> ExitStatus | None:
        """Returns how the rank ended, if it has ended since the last call."""
        if self.exit_status is None and (result := self.poll()):
            self.exit_status = ExitStatus(self.rank, *result)
            if self._has_terminal:
                _take_terminal(os.getpgrp())
            return self.exit_status
        return None


def _take_terminal(group: int) -> None:
    """Puts a process group into the foreground of the terminal of standard input, from its background."""
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # which would stop this process
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.tcsetpgrp(0, group)
    signal.signal(signal.SIGTTOU, before)


def _exec(
    command: Sequence[str],
    environment: Mapping[str, str],
    reaper: Reaper,
    parent: int,
    descriptors: tuple[int, int, int, int],
) -> None:
    """Becomes the program; runs in the new process. Never returns.

    If `parent` ends, and the reaper with it, the kernel still sends the program SIGTERM: prctl(2).
    """
    *streams, report_failure = descriptors
    try:
        os.setpgid(0, 0)
        reaper.watch_group(os.getpid())
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before that call
            os._exit(127)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, other programs should not
            signal.signal(number, signal.SIG_DFL)
        for number in HANDLED:  # from here on signals are for this process, not for hvdrun's wake-up pipe
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        # A rank is in the background of hvdrun's terminal, which would stop it for ever when it uses it. With
        # these ignored, reading fails (EIO), as a prompt for a password then says, and writing works.
        for number in (signal.SIGTTIN, signal.SIGTTOU):
            signal.signal(number, signal.SIG_IGN)
        if (*streams,) == _TERMINAL:
            _take_terminal(os.getpid())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        os.execve(command[0], list(command), environment)
    except OSError as error:
        os.write(report_failure, str(error.errno).encode())
    finally:
        os._exit(127)


# ---- Starts the ranks and the servers of tables of the host where this runs ----------------------------


SERVER_COMMAND = [sys.executable, *module_words("sirtaki.torch.training.stale.serving")]
REPORTS = "SIRTAKI_DUMP_DIRECTORY"
TIMELINE = "SIRTAKI_TIMELINE"


def report_file(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's failure report."""
    return folder / f"rank{rank}.json"


def remove_reports(folder: Path, ranks: Iterable[int]) -> None:
    """Removes the failure reports that an earlier job left for these ranks; call before the ranks start.

    A rank removes its own old report only in `hvd.init()`, which it may not reach.

    Raises LaunchError if one cannot be removed: it would be taken for a report of this job.
    """
    for file in (report_file(folder, rank) for rank in ranks):
        try:
            file.unlink()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            text = f"cannot remove {file}, a failure report of an earlier job: {error.strerror}"
            raise LaunchError(
                f"{text}. Remove it, or choose another folder with --dump-directory", 1
            ) from None


class ProcessStart(NamedTuple):
    """The start of a process; `name` is its name in messages."""

    number: int
    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


def starts_of(
    command: Sequence[str],
    environment: RankEnvironment,
    base: Mapping[str, str],
    placements: Sequence[RankPlacement],
    servers: Sequence[int],
) -> Iterator[ProcessStart]:
    """Yields the starts of a host's ranks, and of its servers of tables, by their numbers."""
    for placement in placements:
        yield ProcessStart(placement.rank, f"rank {placement.rank}", command, environment.of(placement, base))
    for number in servers:
        index = number - placements[0].size
        yield ProcessStart(number, f"server {index}", SERVER_COMMAND, environment.of_server(index, base))


def start_process(
    start: ProcessStart, folder: JobFolder, reaper: Reaper, has_terminal: bool = False
) -> RankProcess:
    """Starts a process of a job; `has_terminal`: it has the terminal of this process.

    Raises CannotStart, or LaunchError at a signal that asks hvdrun to end.
    """
    number, name, command, environment = start
    try:
        folder.restore_key()
        return RankProcess(number, command, environment, reaper, has_terminal)
    except OSError as error:
        if error.errno == errno.ENOEXEC:
            text = f"{command[0]} is neither a program nor a script that begins with '#!'"
        else:
            text = f"cannot start {name}: {command[0]}: {error.strerror}"
        raise CannotStart(text) from None
