"""The files that this process has open: other tests' threads and garbage may close some at any time."""

from __future__ import annotations

import contextlib
import os


def open_files() -> dict[int, str]:
    """Returns what each descriptor of this process refers to."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def opened_since(before: dict[int, str]) -> dict[int, str]:
    """Returns the descriptors that are open now, and were not, or referred to something else."""
    return {number: file for number, file in open_files().items() if before.get(number) != file}
