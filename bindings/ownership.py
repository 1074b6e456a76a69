"""Ownership of files and folders: what another user may have written is neither trusted nor followed."""

from __future__ import annotations

import os


def others_can_write(status: os.stat_result) -> bool:
    """Returns whether another user owns the file or folder, or may write to it."""
    return status.st_uid != os.getuid() or bool(status.st_mode & 0o022)
