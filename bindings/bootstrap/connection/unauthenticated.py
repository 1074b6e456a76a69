"""Connections that have not authenticated yet: their number is limited, the oldest of the busiest source is
dropped first, and rejections are logged.

Any process that can reach an open port may open any number of them, and none of that may block the ranks, use
up memory or files, or fill a log.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from sirtaki.bindings.bootstrap.connection.handshake import (
    HANDSHAKE_SECONDS,
    OWN_MACHINE,
    HandshakeConnection,
    is_trusted_user,
)

TOO_SLOW = "it did not authenticate in time"
# Maximum number of connections over TCP, further limited by the descriptors. All ranks of a host may connect
# at the same moment over a Unix socket, which accepts processes of the same user only.
LIMIT = 128
OWN_SECONDS = 60.0  # for a handshake over a Unix socket: many ranks that start keep a machine busy
_DESCRIPTOR_DIVISOR = 4  # this part of the files that the process may still open
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_SECONDS = 0.02  # seconds, when there was no connection to drop
_BURST_LINES = 8
_SECONDS_PER_LINE = 10.0  # per line, after those

Pending = TypeVar("Pending", bound=HandshakeConnection)


def _available_descriptors() -> int:
    """Returns how many more files this process may open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return LIMIT * _DESCRIPTOR_DIVISOR
    return allowed - len(os.listdir("/proc/self/fd"))


def handshake_deadline(connection: socket.socket) -> float:
    """Returns when to reject a connection that has not authenticated (time.monotonic())."""
    seconds = OWN_SECONDS if connection.family == socket.AF_UNIX else HANDSHAKE_SECONDS
    return time.monotonic() + seconds


class UnauthenticatedConnections(Generic[Pending]):
    """Connections with a handshake in progress, oldest first.

    `reject` has to close a connection, with the given reason, and to remove it.
    """

    def __init__(self, reject: Callable[[Pending, str], None]) -> None:
        self._reject = reject
        self._pending: dict[Pending, None] = {}
        self._limit = max(1, min(LIMIT, _available_descriptors() // _DESCRIPTOR_DIVISOR))

    def accept(self, listening: socket.socket) -> socket.socket | None:
        """Returns the next connection after making room for it; None if it has gone, or is another user's."""
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES and not self._make_room(
                "this process has too many files open"
            ):
                time.sleep(_RETRY_SECONDS)
            return None
        if connection.family == socket.AF_UNIX and not is_trusted_user(connection):
            connection.close()
            return None
        if connection.family != socket.AF_UNIX and self._count_remote() >= self._limit:
            self._make_room("there were too many unauthenticated connections", keeps_own=True)
        return connection

    def add(self, pending: Pending) -> None:
        self._pending[pending] = None

    def discard(self, pending: Pending) -> None:
        self._pending.pop(pending, None)

    def __contains__(self, pending: object) -> bool:
        return pending in self._pending

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._pending))

    @property
    def next_deadline(self) -> float | None:
        """Returns when (time.monotonic()) the next connection times out."""
        return min((pending.deadline for pending in self._pending), default=None)

    def expire(self, now: float, reason: str) -> None:
        """Drops the connections that have timed out."""
        for pending in self:
            if pending.deadline <= now:
                self._reject(pending, reason)

    def _count_remote(self) -> int:
        return sum(pending.source != OWN_MACHINE for pending in self._pending)

    def _make_room(self, reason: str, keeps_own: bool = False) -> bool:
        """Drops the oldest connection of the busiest source; returns False if there is none.

        So a crowd from a single source does not affect other sources. `keeps_own`: keeps connections of Unix
        sockets.
        """
        pending = [
            connection for connection in self._pending if not (keeps_own and connection.source == OWN_MACHINE)
        ]
        if not pending:
            return False
        busiest, _ = Counter(connection.source for connection in pending).most_common(1)[0]
        self._reject(next(connection for connection in pending if connection.source == busiest), reason)
        return True


class RejectionLog:
    """A rate-limited log of rejected connections.

    The first few are reported at once, later rejections at intervals, with the number of unreported
    rejections.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lines = 0
        self._suppressed = 0
        self._next = 0.0

    def add(self, text: str) -> None:
        now = time.monotonic()
        if self._lines >= _BURST_LINES and now < self._next:
            self._suppressed += 1
            return
        more = f" (and {self._suppressed} more since the last time)" if self._suppressed else ""
        self._lines += 1
        self._suppressed = 0
        self._next = now + _SECONDS_PER_LINE
        self._log(text + more)
