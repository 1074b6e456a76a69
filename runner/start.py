"""Starts ranks on the host where this runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from .command import NOT_EXECUTABLE
from .environment import RankEnvironment
from .errors import LaunchError
from .guard import Guard
from .hosts import Place
from .process import RankProcess
from .room import Room

REPORTS = "SIRTAKI_DUMP_DIRECTORY"
TIMELINE = "SIRTAKI_TIMELINE"


def start_ranks(
    command: Sequence[str],
    environment: RankEnvironment,
    places: Sequence[Place],
    guard: Guard,
    room: Room,
) -> list[RankProcess]:
    """Starts a process for each place.

    Raises LaunchError if one cannot be started, if memory runs out, or at a signal that asks hvdrun to end.
    """
    ranks: list[RankProcess] = []
    for place in places:
        if shortage := room.shortage(len(ranks)):
            raise LaunchError(shortage, 1)
        try:
            ranks.append(RankProcess(place.rank, command, environment.of(place, os.environ), guard))
        except OSError as error:
            raise LaunchError(why_not_started(place.rank, command, error), NOT_EXECUTABLE) from None
    return ranks


def why_not_started(rank: int, command: Sequence[str], error: OSError) -> str:
    if error.errno == errno.ENOEXEC:
        return f"{command[0]} is neither a program nor a script that begins with '#!'"
    return f"cannot start rank {rank}: {command[0]}: {error.strerror}"
