"""Frames that outlive the connection on which they were sent.

The two sides count what they receive. When their connection breaks, they continue on another one, and each
sends again what the other one has not received: nothing is lost, and nothing arrives twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from sirtaki.bindings.bootstrap.connection.message_kinds import HEADER, MessageKind
from sirtaki.bindings.bootstrap.connection.wire import Frame
from sirtaki.bindings.bootstrap.job import RendezvousError

# Received bytes after which the other side is told that it need not keep them any more.
CONFIRM_BYTES = 32 * 1024


class ResumableFrames:
    """The frames of a side of a connection: the sent frames that it keeps, and the number it has received.

    Each frame has an owner, a number whose meaning is the user's.
    """

    def __init__(self) -> None:
        self.received = 0  # frames
        self._received_bytes = 0  # since the last confirmation
        self._kept: deque[tuple[int, tuple[bytes, ...]]] = deque()
        self._confirmed = 0  # frames that were kept before those

    def keep(self, owner: int, *parts: bytes) -> None:
        """Records a sent frame, given in parts; large parts are not copied."""
        self._kept.append((owner, parts))

    def confirm(self, count: int) -> Iterator[tuple[int, int]]:
        """Yields the owner and the bytes of each frame that the other side has received meanwhile: `count`
        frames in all. Raises RendezvousError if it cannot have received so many.
        """
        if not self._confirmed <= count <= self._confirmed + len(self._kept):
            raise RendezvousError("the other side has confirmed messages that were not sent")
        while self._confirmed < count:
            owner, parts = self._kept.popleft()
            self._confirmed += 1
            yield owner, sum(map(len, parts))

    def note_received(self, frame: Frame) -> bytes:
        """Counts a frame; returns a confirmation if it is due, else b""."""
        self.received += 1
        self._received_bytes += HEADER.size + len(frame.payload)
        if self._received_bytes < CONFIRM_BYTES:
            return b""
        self._received_bytes = 0
        return Frame(MessageKind.CONFIRM, number=self.received).pack()

    def unconfirmed(self) -> Iterator[bytes]:
        """Yields the parts of all frames that the other side may not have received."""
        for _, parts in self._kept:
            yield from parts
