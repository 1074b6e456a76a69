"""A job's own folder on one host: only its user may open it, and the guard removes it."""

from __future__ import annotations

import contextlib
import os
import secrets

from .errors import LaunchError
from .guard import Guard


def make_private_folder(guard: Guard) -> str:
    """Creates a folder and returns its path. Raises LaunchError if none can be created."""
    name = f"sirtaki-{secrets.token_hex(8)}"
    for parent in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", os.getcwd())):
        path = os.path.join(os.path.abspath(parent), name)
        guard.watch_directory(path)
        with contextlib.suppress(OSError):
            os.mkdir(path, 0o700)
            return path
    raise LaunchError("there is no folder for temporary files: set TMPDIR to one that you may write to", 1)
