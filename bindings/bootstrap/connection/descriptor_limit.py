"""The number of files that a process may have open."""

from __future__ import annotations

import contextlib
import os
import resource

_RESERVE = 256  # descriptors for the rest of the program


def allow_descriptors(count: int) -> None:
    """Raises the soft limit of this process, so that it can open `count` more descriptors.

    The hard limit stays: where that is too low, opening them fails and says so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + _RESERVE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, soft), hard))
