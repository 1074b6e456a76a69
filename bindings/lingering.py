"""What is in flight though nobody waits for it: its tensors stay alive until it has really ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from sirtaki._core.library import ffi, lib

_IN_PROGRESS: int = lib.SRT_IN_PROGRESS
_srt_poll, _srt_release = lib.srt_poll, lib.srt_release


class Lingering:
    """Operations of one context, each batch of them with what it reads and writes.

    They are of handles that were dropped, and of those for which a stream of a GPU waits instead of the host.
    Every call may come from any thread.
    """

    def __init__(self, context: Any) -> None:
        """`context` is the core's."""
        self._context = context
        self._batches: deque[tuple[list[int], list[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, handles: Sequence[int], keep: list[Any]) -> None:
        """Keeps `keep` until all these handles have ended."""
        left = [handle for handle in handles if handle]
        if left:
            self._batches.append((left, keep))

    def sweep(self) -> None:
        """Lets go of what has ended."""
        for _ in range(len(self._batches)):
            try:
                handles, keep = self._batches.popleft()
            except IndexError:  # another thread sweeps, too
                return
            if any(_srt_poll(self._context, handle) == _IN_PROGRESS for handle in handles):
                self._batches.append((handles, keep))
            else:
                _srt_release(self._context, ffi.new("srt_handle[]", handles), len(handles))

    def clear(self) -> None:
        """Lets go of everything: the context has shut down, and nothing is in flight any more."""
        self._batches.clear()
