"""Delivers signals, and wake-ups from other threads, as a descriptor that a selector can poll."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from types import FrameType

from sirtaki.runner.launch.errors import LaunchError

# Signals that hvdrun only passes on to the ranks. A job scheduler may send USR1 to all processes of a job
# before its time is up, which must not end hvdrun or its agents.
PASSED_ON = frozenset({signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
HANDLED = PASSED_ON | {signal.SIGINT, signal.SIGTERM, signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD}


class WakeupPipe:
    """A wake-up pipe that signals and other threads (`wake`) write to; the main loop reads it.

    From `block_signals` to `unblock_signals` ranks can be started undisturbed. A signal that was ignored when
    hvdrun started (as nohup does) stays ignored.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def close(self) -> None:
        """Stops handling signals: the job has ended."""
        signal.set_wakeup_fd(-1)
        self._receiver.close()
        self._sender.close()

    def block_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)

    def unblock_signals(self) -> None:
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, _ignore_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    @contextlib.contextmanager
    def signals_blocked(self) -> Iterator[None]:
        """Blocks signals within the `with` block."""
        self.block_signals()
        try:
            yield
        finally:
            self.unblock_signals()

    def wake(self) -> None:
        """Wakes the main loop; called by other threads."""
        try:
            self._sender.send(b"\0")
        except BlockingIOError:  # a wake-up is already pending
            return

    def read(self) -> bytes:
        """Returns the numbers of the signals received; 0 for a `wake`."""
        try:
            return self._receiver.recv(4096)
        except BlockingIOError:
            return b""


def refuse_to_start_after_a_signal() -> None:
    """Raises LaunchError if a signal that asks this process to end has arrived since `block_signals`."""
    pending = signal.sigpending()
    for number, cause in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated (SIGTERM)")):
        if number in pending and signal.getsignal(number) is not signal.SIG_IGN:
            raise LaunchError(f"{cause} before all ranks were started: ending those that were", 128 + number)


def stop_this_process() -> None:
    """Stops this process, as Ctrl-Z does; returns when it is continued."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python itself writes the number to the wake-up pipe; the main loop does the rest."""
