"""Detached operations, which nobody waits for: their tensors stay alive until the operations have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from sirtaki.bindings.library import ffi, lib

_IN_PROGRESS: int = lib.SRT_IN_PROGRESS
_srt_poll, _srt_release = lib.srt_poll, lib.srt_release


class DetachedOperations:
    """Detached operations of one context: batches of handles, each with the memory that it reads and writes.

    They belong to handles that were dropped, or to handles for which a GPU stream waits instead of the host.
    Every method may be called from any thread.
    """

    def __init__(self, context: Any) -> None:
        """Creates an empty collection. `context` is the core's."""
        self._context = context
        self._batches: deque[tuple[list[int], list[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, handles: Sequence[int], keepalive: list[Any]) -> None:
        """Holds `keepalive` until all these handles have ended."""
        left = [handle for handle in handles if handle]
        if left:
            self._batches.append((left, keepalive))

    def sweep(self) -> None:
        """Releases the operations that have ended, with their tensors."""
        for _ in range(len(self._batches)):
            try:
                handles, keepalive = self._batches.popleft()
            except IndexError:  # another thread sweeps, too
                return
            if any(_srt_poll(self._context, handle) == _IN_PROGRESS for handle in handles):
                self._batches.append((handles, keepalive))
            else:
                self._release(handles)

    def clear(self) -> None:
        """Releases everything: the context has shut down, so nothing is in flight any more.

        Results that the core has allocated on a GPU are freed with the context only if they were released.
        """
        for _ in range(len(self._batches)):
            try:
                handles, _keepalive = self._batches.popleft()
            except IndexError:  # another thread sweeps
                return
            self._release(handles)

    def _release(self, handles: list[int]) -> None:
        _srt_release(self._context, ffi.new("srt_handle[]", handles), len(handles))
