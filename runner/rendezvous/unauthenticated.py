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

from sirtaki.runner.rendezvous.handshake import HANDSHAKE_SECONDS
from sirtaki.runner.rendezvous.handshake_connection import HandshakeConnection, is_ours

TOO_SLOW = f"it did not authenticate within {HANDSHAKE_SECONDS:g} s"
LIMIT = 128  # maximum number of connections, further limited by
_SHARE_OF_FILES = 4  # this part of the files that the process may still open
_NO_FILES_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WAIT_FOR_FILES = 0.02  # seconds, when there was no connection to drop
_LINES_AT_ONCE = 8
_SECONDS_A_LINE = 10.0  # per line, after those

Stranger = TypeVar("Stranger", bound=HandshakeConnection)


def _files_left() -> int:
    """Returns how many more files this process may open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return LIMIT * _SHARE_OF_FILES
    return allowed - len(os.listdir("/proc/self/fd"))


class UnauthenticatedConnections(Generic[Stranger]):
    """Connections whose handshake is in progress, oldest first.

    `send_away` has to close a connection, with the given reason, and to remove it.
    """

    def __init__(self, send_away: Callable[[Stranger, str], None]) -> None:
        self._send_away = send_away
        self._all: dict[Stranger, None] = {}
        self._limit = max(1, min(LIMIT, _files_left() // _SHARE_OF_FILES))

    def accept(self, listening: socket.socket) -> socket.socket | None:
        """Returns the next connection after making room for it; None if it has gone, or is another user's."""
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if error.errno in _NO_FILES_LEFT and not self._make_room("this process has too many files open"):
                time.sleep(_WAIT_FOR_FILES)
            return None
        if connection.family == socket.AF_UNIX and not is_ours(connection):
            connection.close()
            return None
        if len(self._all) >= self._limit:
            self._make_room("there were too many unauthenticated connections")
        return connection

    def add(self, stranger: Stranger) -> None:
        self._all[stranger] = None

    def discard(self, stranger: Stranger) -> None:
        self._all.pop(stranger, None)

    def __contains__(self, stranger: object) -> bool:
        return stranger in self._all

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Stranger]:
        return iter(list(self._all))

    @property
    def patience_ends(self) -> float | None:
        """Returns when (time.monotonic()) the oldest connection times out."""
        return next((stranger.patience_ends for stranger in self._all), None)

    def lose_patience(self, now: float, reason: str) -> None:
        """Drops the connections that have timed out."""
        for stranger in self:
            if stranger.patience_ends > now:
                return
            self._send_away(stranger, reason)

    def _make_room(self, reason: str) -> bool:
        """Drops the oldest connection of the busiest source, so that a crowd from one source does not
        affect the others. Returns False if there was none.
        """
        if not self._all:
            return False
        crowded, _ = Counter(stranger.source for stranger in self._all).most_common(1)[0]
        self._send_away(next(one for one in self._all if one.source == crowded), reason)
        return True


class Complaints:
    """A rate-limited log of rejected connections: the first few are reported at once, later ones at
    intervals, with the number of those not reported.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lines = 0
        self._untold = 0
        self._next = 0.0

    def add(self, text: str) -> None:
        now = time.monotonic()
        if self._lines >= _LINES_AT_ONCE and now < self._next:
            self._untold += 1
            return
        more = f" (and {self._untold} more since the last time)" if self._untold else ""
        self._lines += 1
        self._untold = 0
        self._next = now + _SECONDS_A_LINE
        self._say(text + more)
