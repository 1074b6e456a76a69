"""Those who have come and not yet proved who they are: how many may, who has to go first, what is said of
them.

Anybody who can reach an open port may be one of them, any number of times, and none of that may keep the
ranks waiting, use up memory or files, or fill a log.
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

from .arrival import Arrival
from .handshake import HANDSHAKE_SECONDS

TOO_SLOW = f"it did not prove who it is within {HANDSHAKE_SECONDS:g} s"
LIMIT = 128  # so many may be at it at once, but
_SHARE_OF_FILES = 4  # no more than this part of the files that the process may still open
_NO_FILES_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WAIT_FOR_FILES = 0.02  # seconds, when nobody could be sent away to make room
_LINES_AT_ONCE = 8
_SECONDS_A_LINE = 10.0  # after those

Stranger = TypeVar("Stranger", bound=Arrival)


def _files_left() -> int:
    """How many files this process may open besides those that it has open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return LIMIT * _SHARE_OF_FILES
    return allowed - len(os.listdir("/proc/self/fd"))


class Strangers(Generic[Stranger]):
    """Connections on which somebody is proving who he is, oldest first.

    `send_away` has to close one, with that reason, and to take it out.
    """

    def __init__(self, send_away: Callable[[Stranger, str], None]) -> None:
        self._send_away = send_away
        self._all: dict[Stranger, None] = {}
        self._limit = max(1, min(LIMIT, _files_left() // _SHARE_OF_FILES))

    def accept(self, listening: socket.socket) -> socket.socket | None:
        """The next connection, for which there is room now; None if there is none after all."""
        try:
            connection, _ = listening.accept()
        except OSError as error:
            if error.errno in _NO_FILES_LEFT and not self._make_room("this process has too many files open"):
                time.sleep(_WAIT_FOR_FILES)
            return None
        if len(self._all) >= self._limit:
            self._make_room("too many others came that did not prove who they are")
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
        """When (time.monotonic()) the oldest one has had its time."""
        return next((stranger.patience_ends for stranger in self._all), None)

    def lose_patience(self, now: float, reason: str) -> None:
        """Sends those away who have had their time."""
        for stranger in self:
            if stranger.patience_ends > now:
                return
            self._send_away(stranger, reason)

    def _make_room(self, reason: str) -> bool:
        """Sends away the oldest of those who came from where most come from: a crowd from one place leaves
        the others alone. False if there was nobody.
        """
        if not self._all:
            return False
        crowded, _ = Counter(stranger.source for stranger in self._all).most_common(1)[0]
        self._send_away(next(one for one in self._all if one.source == crowded), reason)
        return True


class Complaints:
    """Says who was refused and why: the first few times at once, later now and then, with how many were not
    told.
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
