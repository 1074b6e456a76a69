"""Completes futures of operations in flight: one thread per process, which runs while there are any.

An operation that nobody has asked for a future needs no thread: whoever waits for it drives the engine.
"""

from __future__ import annotations

import threading
from typing import Protocol

# The core waits for given operations, not for the first of several: the thread waits for the oldest, and
# looks at the others after at most this long, in seconds. The limit doubles while nothing ends.
_SHORTEST_WAIT, _LONGEST_WAIT = 0.001, 0.008


class Completable(Protocol):
    """An operation whose future is completed."""

    def wait_briefly(self, seconds: float) -> None:
        """Waits until it has ended, but not longer than this."""
        ...

    def complete_if_ended(self) -> bool:
        """Completes the future if the operation has ended; returns whether it has."""
        ...


class Completer:
    """The operations whose futures are open, by their age, and the thread that completes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[Completable] = []
        self._is_running = False

    def add(self, operation: Completable) -> None:
        """Completes the operation's future once it has ended."""
        with self._lock:
            self._pending.append(operation)
            if self._is_running:
                return
            self._is_running = True
        # A program may end while a peer never answers: the thread does not keep it from doing so.
        threading.Thread(target=self._run, name="sirtaki-futures", daemon=True).start()

    def _run(self) -> None:
        limit = _SHORTEST_WAIT
        while True:
            with self._lock:
                if not self._pending:
                    self._is_running = False
                    return
                pending = list(self._pending)
            pending[0].wait_briefly(limit)
            ended = {id(one) for one in pending if one.complete_if_ended()}
            limit = _SHORTEST_WAIT if ended else min(2 * limit, _LONGEST_WAIT)
            with self._lock:
                self._pending = [one for one in self._pending if id(one) not in ended]


completer = Completer()
