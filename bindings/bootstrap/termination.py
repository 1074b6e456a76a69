"""Signals that ask a rank to end, of which the program is to hear first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], None]


_NOTICE = (
    b"sirtaki: asked to end (SIGTERM): all ranks stop at their next hvd.should_stop(); another SIGTERM ends "
    b"this rank at once\n"
)


class StopRequests:
    """Records the signals that ask this process to stop.

    A second SIGTERM ends it, and so does the first if its world has failed, as `has_failed` returns, or its
    parent, such as hvdrun, has ended. A handler that the program has set before is called, too. A signal that
    was ignored stays ignored.
    """

    def __init__(self, has_failed: Callable[[], bool]) -> None:
        self._has_failed = has_failed
        self.is_asked = False
        self.is_listening = False
        self._before: dict[int, Any] = {}  # by signal: the handler before this object's
        self._had_sigterm = self._has_hooks = False
        self._parent = 0

    def listen(self, numbers: Sequence[int]) -> None:
        """Begins to record these signals. Raises RuntimeError outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"hvd.should_stop() is called first in the thread {threading.current_thread().name!r}, but "
                "only the main thread can receive signals: call it there first"
            )
        self.is_listening, self._parent = True, os.getppid()
        if not self._has_hooks:
            self._has_hooks = True
            end_children_on_sigterm(self._handle)
        for number in numbers:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._handle)

    def end(self) -> None:
        """Restores the handlers: nobody asks this object any more."""
        self.is_listening = False
        with suppress(ValueError):  # not in the main thread
            for number in list(self._before):
                signal.signal(number, self._before.pop(number))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if number == signal.SIGTERM and self._ends_at_once():
            signal.signal(number, before if callable(before) else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.is_asked = True
        if number == signal.SIGTERM:
            self._had_sigterm = True
            with suppress(OSError):  # the reader may be gone
                os.write(2, _NOTICE)
        if callable(before):
            before(number, frame)

    def _ends_at_once(self) -> bool:
        return self._had_sigterm or self._has_failed() or os.getppid() != self._parent


def end_children_on_sigterm(handler: Handler) -> None:
    """Makes SIGTERM end forked children, such as the workers of a DataLoader, although `handler` is set here.

    Python drops a signal that arrives in a child before its hooks have run; it is blocked until then.
    """
    before: set[int] = set()

    def block() -> None:
        before.clear()
        before.update(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))

    def unblock() -> None:
        if signal.SIGTERM not in before:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def unblock_in_child() -> None:
        if signal.getsignal(signal.SIGTERM) == handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock_in_child)
