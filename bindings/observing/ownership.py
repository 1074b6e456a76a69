"""Ownership of files and folders: what another user may have written is neither trusted nor followed."""

from __future__ import annotations

import errno
import os
import stat
import weakref
from pathlib import Path


def others_can_write(status: os.stat_result) -> bool:
    """Returns whether another user owns the file or folder, or may write to it."""
    return status.st_uid != os.getuid() or bool(status.st_mode & 0o022)


def is_private(status: os.stat_result) -> bool:
    """Returns whether this user owns the folder, and nobody else may open it."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def held_folder(path: Path, owner: object = None) -> Path:
    """Returns a path that means this private folder while `owner` exists, by default until the process ends.

    The name of a folder for temporary files may mean another user's folder after a program has removed the
    first one. Raises OSError if the folder is not private to this user.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not is_private(os.fstat(descriptor)):
        os.close(descriptor)
        raise PermissionError(
            errno.EPERM, "the folder belongs to another user, or is open to others", str(path)
        )
    if owner is not None:
        weakref.finalize(owner, os.close, descriptor)
    return Path(f"/proc/self/fd/{descriptor}")
