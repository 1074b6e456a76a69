"""SIGTERM to a worker: it asks to leave at the next commit, and its children end as ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from types import FrameType

from sirtaki.runner.rendezvous.elastic.messages import End
from sirtaki.runner.rendezvous.elastic.worker import Worker


@dataclass
class _Draining:
    """Handles SIGTERM in one process."""

    worker: Worker
    parent: int = field(default_factory=os.getppid)  # hvdrun or its agent, as a rule
    is_asked: threading.Event = field(default_factory=threading.Event)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Asks to leave. A second signal ends the process, and so does the first one if the job has ended:
        hvdrun sends it after its message. If hvdrun, or the agent of this host, is gone, the kernel sends it.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.is_asked.set()
        if _is_final(self.worker.end) or os.getppid() != self.parent:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        sys.stderr.write("sirtaki: asked to end (SIGTERM): this rank leaves at the next commit\n")
        # A thread of its own: the interrupted code may be sending, too.
        threading.Thread(target=self.worker.drain, name="sirtaki drain", daemon=True).start()

    def end(self, message: End) -> None:
        """Ends the process if the message of the job's end has come after the signal."""
        if self.is_asked.is_set() and _is_final(message):
            os.kill(os.getpid(), signal.SIGTERM)


def drain_on_sigterm(worker: Worker) -> None:
    """Makes SIGTERM ask for a place to leave, unless the program handles it itself."""
    draining = _Draining(worker)
    try:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, draining.handle)
    except ValueError:  # init() was called outside of the main thread
        return
    worker.on_end(draining.end)
    _end_children_on_sigterm(draining)


def _end_children_on_sigterm(draining: _Draining) -> None:
    """Makes SIGTERM end forked children, such as the workers of a DataLoader.

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
        if signal.getsignal(signal.SIGTERM) == draining.handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=unblock_in_child)


def _is_final(message: End | None) -> bool:
    """Returns whether the job has ended, and not only this worker's part in it."""
    return message is not None and message.code != 0
