"""One rank as a process: started in a group of its own, watched, signalled, buried at the end of the job."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from .culprit import Ending
from .guard import Guard
from .signals import HANDLED


class RankProcess:
    """A running rank, which leads its own process group.

    It stays unburied until `bury`, so that the number of its group cannot pass to anyone else.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], guard: Guard
    ) -> None:
        """Starts the rank; raises OSError if the system refuses or cannot run the program.

        `command` begins with the path of the program; by it Python finds the environment it belongs to.
        """
        self.rank = rank
        self.ending: Ending | None = None
        self._buried = False
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        failure, report_failure = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command, environment, guard, (stdout, stderr, report_failure))
        for descriptor in (stdout, stderr, report_failure):
            os.close(descriptor)
        with open(failure, "rb") as file:
            error = file.read()  # ends when the program has replaced this one, or with the reason why not
        if error:
            os.waitpid(self.pid, 0)
            raise OSError(int(error), os.strerror(int(error)), command[0])

    def check(self) -> Ending | None:
        """How the rank ended, if it has ended since the last look."""
        if self.ending is not None:
            return None
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        exited = result.si_code == os.CLD_EXITED
        self.ending = Ending(
            self.rank, self.pid, result.si_status if exited else 0, 0 if exited else result.si_status
        )
        return self.ending

    def signal(self, number: int) -> None:
        """Sends a signal to the rank and to all processes that it has started in its group."""
        if self._buried:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def bury(self) -> None:
        """Lets the system forget the rank, which has ended."""
        os.waitpid(self.pid, 0)
        self._buried = True


def _become(
    command: Sequence[str], environment: Mapping[str, str], guard: Guard, descriptors: tuple[int, int, int]
) -> None:
    """In the new process: becomes the rank. Never returns."""
    stdout, stderr, report_failure = descriptors
    try:
        os.setpgid(0, 0)
        guard.watch_group(os.getpid())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, other programs should not
            signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        os.execve(command[0], list(command), environment)
    except OSError as error:
        os.write(report_failure, str(error.errno).encode())
    finally:
        os._exit(127)
