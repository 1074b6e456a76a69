"""A job's private folder on a host, with its key: only its user may open it, and the reaper removes it."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from sirtaki.bindings.bootstrap.job import write_key
from sirtaki.bindings.observing.ownership import is_private
from sirtaki.runner.launch.errors import LaunchError
from sirtaki.runner.launch.reaper import Reaper


class JobFolder:
    """The folder, for as long as this process runs.

    Attributes:
        key: the job's key, which processes of the job read from `key_file`.
    """

    def __init__(self, reaper: Reaper, key: bytes | None = None) -> None:
        """Creates the folder with this key, by default a new key.

        Raises LaunchError if no folder for temporary files can hold it.
        """
        self._reaper = reaper
        name, reason = f"sirtaki-{secrets.token_hex(8)}", ""
        for parent in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", os.getcwd())):
            self.path = Path(parent).absolute() / name
            self.key_file = str(self.path / "key")
            reaper.watch_directory(str(self.path))
            try:
                self.path.mkdir(0o700)
                self.key = write_key(self.key_file, key)
                reaper.lock_directory(str(self.path))
                return
            except OSError as error:  # another file system may have room
                reason = f"cannot write the job's key to {self.key_file}: {error.strerror}"
                shutil.rmtree(self.path, ignore_errors=True)
        raise LaunchError(f"{reason}. Set TMPDIR to a folder that you can write to", 1)

    def restore_key(self) -> None:
        """Writes the key again if a program that cleans temporary files has removed it: new workers read it.

        Raises OSError if that is impossible, or if another user has made a folder with this name.
        """
        if not os.path.lexists(self.path):
            self.path.mkdir(0o700)
            self._reaper.lock_directory(str(self.path))
        if not is_private(os.lstat(self.path)):
            raise PermissionError(None, f"{self.path} is not this job's folder any more")
        if not os.path.lexists(self.key_file):
            write_key(self.key_file, self.key)
