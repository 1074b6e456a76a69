"""Completes futures of operations in flight: a thread per context, which sleeps until one of them has ended.

An operation that nobody has asked for a future needs no thread: whoever waits for it drives the engine.
"""

from __future__ import annotations

import atexit
import threading
import traceback
import weakref
from collections.abc import Iterable
from typing import Protocol

from sirtaki.bindings.context import Context
from sirtaki.bindings.request import Batch
from sirtaki.bindings.watching import Watch, watch

# A thread without open futures stays for so many slices of 100 ms: the next step of a training soon has more.
_IDLE_SLICES = 10
_END_SECONDS = 5.0  # the longest wait for a thread when the interpreter ends: a callback may take its time


class Completable(Protocol):
    """An operation whose future is completed."""

    def complete_if_ended(self) -> bool:
        """Completes the future if the operation has ended; returns whether it has."""
        ...


class Completer:
    """The operations of a context whose futures are open, and the thread that completes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, Completable] = {}  # by the handles that have not been reported yet
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def add(self, context: Context, operation: Completable, batch: Batch) -> None:
        """Completes the operation's future once its batch has ended, which must not be released meanwhile."""
        with self._lock:  # the thread sees an operation only once it is both watched and pending
            watch(context, batch)
            self._pending.update(dict.fromkeys(batch.handles, operation))
            if self._thread is None and not self._is_ending:
                # A program may end while a peer never answers: the thread does not keep it from doing so.
                name = "sirtaki-futures"
                self._thread = threading.Thread(target=self._run, args=[context], name=name, daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Ends the thread, for the end of the interpreter: futures that are still open stay so."""
        with self._lock:
            self._is_ending, thread = True, self._thread
        if thread is not None:
            thread.join(_END_SECONDS)

    def _take(self, handles: Iterable[int]) -> list[Completable]:
        """Removes handles; returns their operations, each once, in the order of the handles."""
        with self._lock:
            found = [self._pending.pop(handle, None) for handle in handles]
        return list({id(one): one for one in found if one is not None}.values())

    def _run(self, context: Context) -> None:
        ends, idle_slices = Watch(context), 0
        while True:
            ended = ends.collect()
            self._complete(ended or [])
            idle_slices = 0 if ended else idle_slices + 1
            with self._lock:
                is_idle = not self._pending and (ended is None or idle_slices >= _IDLE_SLICES)
                if is_idle or self._is_ending:
                    self._thread = None
                    return

    def _complete(self, ended: Iterable[int]) -> None:
        """Completes operations, and keeps none of them while the thread sleeps."""
        for operation in self._take(ended):
            try:
                operation.complete_if_ended()
            except Exception:  # of one future, which must not be the end of all others
                traceback.print_exc()


_completers: weakref.WeakKeyDictionary[Context, Completer] = weakref.WeakKeyDictionary()


def completer_of(context: Context) -> Completer:
    """Returns the completer of a context; all threads get the same one."""
    return _completers.get(context) or _completers.setdefault(context, Completer())


# An interpreter that ends stops its threads where they next need its lock. Inside torch's code, as when a
# thread drops a tensor, that ends the process by an abort.
@atexit.register
def _end_all() -> None:
    for completer in list(_completers.values()):
        completer.end()
