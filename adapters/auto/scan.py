"""`os.scandir` for folders with files in both layers (`private_files`)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from sirtaki.auto.private_files import PrivateFiles


class Scan:
    """The entries of a folder: an iterator and a context, as `os.scandir` returns it."""

    def __init__(self, files: PrivateFiles, location: str, path: Any, names: list[str]) -> None:
        """Begins. `path` is the folder as the script names it: a path, a descriptor, or None."""
        is_bytes = isinstance(path, bytes)
        self._entries: Iterator[FolderEntry] = (
            FolderEntry(
                files, f"{location.rstrip('/')}/{name}", os.fsencode(name) if is_bytes else name, path
            )
            for name in names
        )

    def __iter__(self) -> Scan:
        return self

    def __next__(self) -> FolderEntry:
        return next(self._entries)

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class FolderEntry:
    """An entry of a folder, with the attributes of `os.DirEntry`."""

    def __init__(self, files: PrivateFiles, location: str, name: Any, folder: Any) -> None:
        self._location, self._files = location, files
        self.name = name
        is_open = isinstance(folder, int)
        self.path = name if is_open else os.path.join("." if folder is None else os.fspath(folder), name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        location = self._files.locate(self._location, follow=follow_symlinks)
        if location is None:  # all ranks share the file
            return os.stat(self._location, follow_symlinks=follow_symlinks)
        status = self._files.status(location)
        if status is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return status

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False
