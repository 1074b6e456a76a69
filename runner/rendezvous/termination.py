"""Signals that ask a rank to end, of which the program is to hear first."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


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
