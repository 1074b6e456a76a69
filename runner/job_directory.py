"""A job's own folder on one host: only its user may open it, and the reaper removes it."""

from __future__ import annotations

import contextlib
import os
import secrets

from sirtaki.runner.errors import LaunchError
from sirtaki.runner.reaper import Reaper

PREFIX = "sirtaki-"


def parents() -> list[str]:
    """Returns the folders that may have jobs' own folders, the preferred one first."""
    found = filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", os.getcwd()))
    return list(dict.fromkeys(map(os.path.abspath, found)))


def make_job_directory(reaper: Reaper) -> str:
    """Creates a folder and returns its path. Raises LaunchError if none can be created."""
    name = f"{PREFIX}{secrets.token_hex(8)}"
    for parent in parents():
        path = os.path.join(parent, name)
        reaper.watch_directory(path)
        with contextlib.suppress(OSError):
            os.mkdir(path, 0o700)
            return path
    raise LaunchError("there is no folder for temporary files: set TMPDIR to one that you can write to", 1)
