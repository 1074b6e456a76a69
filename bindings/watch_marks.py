"""The marks by which a watcher of a job asks its ranks for their states. Opening them needs no core."""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER = "states"  # in a job's private folder
REMOTE = "remote"  # in that folder: one with the states of other hosts' ranks
ALWAYS = "always"  # the mark of a watcher that stays until the job ends: a file in the folder
FOR_NOW = "for now"  # that of a watcher that renews it
FOR_NOW_SECONDS = 10.0
INTERVAL_SECONDS = 1.0  # between two looks at the marks, and between two states


def is_watched(folder: Path) -> bool:
    """Returns whether the folder has a watcher's mark."""
    return is_watched_for_now(folder) or (folder / ALWAYS).exists()


def is_watched_for_now(folder: Path) -> bool:
    """Returns whether the folder has the mark of a watcher that renews it."""
    try:
        age = time.time() - os.stat(folder / FOR_NOW).st_mtime
    except OSError:
        age = FOR_NOW_SECONDS
    return abs(age) < FOR_NOW_SECONDS


def watch_for_now(folder: Path) -> None:
    """Sets or renews the mark. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / FOR_NOW).touch()
