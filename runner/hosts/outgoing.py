"""Bytes on their way to a descriptor that does not block."""

from __future__ import annotations

import os
import selectors


class Outgoing:
    """An owned descriptor, and the bytes that its reader has not yet received."""

    def __init__(self, descriptor: int, selector: selectors.BaseSelector) -> None:
        self._descriptor = descriptor
        self._selector = selector
        self._waiting = bytearray()
        self._watched = False
        self._ends = False
        os.set_blocking(descriptor, False)

    @property
    def backlog(self) -> int:
        """Returns how many bytes have not been written yet."""
        return len(self._waiting)

    def send(self, data: bytes) -> None:
        """Writes as much as the reader takes now, and the rest later; nothing once it is closed."""
        if self._descriptor >= 0 and not self._ends:
            self._waiting += data
            self._write()

    def finish(self) -> None:
        """Closes the descriptor once everything is written."""
        self._ends = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """Closes the descriptor; the rest is not written."""
        if self._descriptor >= 0:
            self._watch(False)
            os.close(self._descriptor)
            self._descriptor = -1
        self._waiting.clear()

    def _write(self) -> None:
        try:
            del self._waiting[: os.write(self._descriptor, self._waiting)]
        except BlockingIOError:
            pass
        except OSError:  # the reader has gone, as another descriptor reports
            self.close()
            return
        if self._ends and not self._waiting:
            self.close()
        else:
            self._watch(bool(self._waiting))

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._watched:
            self._selector.register(self._descriptor, selectors.EVENT_WRITE, self._write)
        elif self._watched and not wanted:
            self._selector.unregister(self._descriptor)
        self._watched = wanted
