"""Bytes that wait until a non-blocking connection takes them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sirtaki.bindings.bootstrap.connection.encryption import Connection

SHARED_BYTES = 4096  # from this size on, bytes are kept as they are instead of being copied


class SendQueue:
    """Bytes to send, in order; queues share large messages instead of copying them."""

    def __init__(self) -> None:
        self._parts: deque[bytearray | memoryview] = deque()
        self.size = 0  # bytes that wait

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __iadd__(self, data: bytes) -> SendQueue:
        self.size += len(data)
        if len(data) >= SHARED_BYTES:
            self._parts.append(memoryview(data))
        elif data and self._parts and isinstance(last := self._parts[-1], bytearray):
            last += data
        elif data:
            self._parts.append(bytearray(data))
        return self

    def send(self, connection: Connection) -> None:
        """Sends as much as fits. Raises OSError if the connection is lost."""
        while self._parts:
            part = self._parts[0]
            try:
                sent = connection.send(part)
            except BlockingIOError:
                return
            self.size -= sent
            if sent == len(part):
                self._parts.popleft()
                continue
            self._parts[0] = part[sent:]
            return

    def clear(self) -> None:
        self._parts.clear()
        self.size = 0
