"""A job's own folder on one host: only its user may open it, and the reaper removes it."""

from __future__ import annotations

import contextlib
import os
import secrets

from sirtaki.runner.errors import LaunchError
from sirtaki.runner.reaper import Reaper


def make_job_directory(reaper: Reaper) -> str:
    """Creates a folder and returns its path. Raises LaunchError if none can be created."""
    name = f"sirtaki-{secrets.token_hex(8)}"
    for parent in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", os.getcwd())):
        path = os.path.join(os.path.abspath(parent), name)
        reaper.watch_directory(path)
        with contextlib.suppress(OSError):
            os.mkdir(path, 0o700)
            return path
    raise LaunchError("there is no folder for temporary files: set TMPDIR to one that you can write to", 1)
