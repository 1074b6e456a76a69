"""Checkpoints of an elastic training, for the case that all ranks are lost.

Rank 0 writes them in the background. A file is complete or not there: it gets its name when all is on disk.
It begins with a header (magic, format, and the SHA-256 digest of the rest); a pickle follows.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
import re
import secrets
import stat
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.bindings.ownership import others_can_write

_PATTERN = re.compile(r"(\d+)\.checkpoint")
_UNFINISHED = re.compile(r"\d+\.\w+\.new")
_FORMAT = 2
_KEPT = 2  # the newest, and the one before it
_HEADER = struct.Struct("!16sI32s")  # magic, format, digest
_MAGIC = b"sirtaki states\n\0"
_BLOCK_BYTES = 1 << 20


class Checkpoints:
    """The checkpoints in one folder. Only rank 0 writes; the others must be able to read them."""

    def __init__(
        self, folder: str | os.PathLike[str], every: int, fence: Callable[[], None] = lambda: None
    ) -> None:
        """Names the folder, which is made with the first checkpoint.

        Args:
            every: commits between two checkpoints.
            fence: raises an exception if this process may not write any more.

        Raises:
            ValueError: `every` is not positive.
        """
        if every <= 0:
            raise ValueError(f"every is {every}, but it has to be a positive number of commits")
        self._folder = Path(folder).absolute()
        self._every = every
        self._fence = fence
        self._written = 0  # the number of the commit that was written last
        self._writer: threading.Thread | None = None
        self._intact: set[Path] = set()  # files that this process has written, or read to their end

    def is_due(self, commit: int) -> bool:
        """Returns whether a commit should be written, and no other one is still being written."""
        is_busy = self._writer is not None and self._writer.is_alive()
        return commit - self._written >= self._every and not is_busy

    def write(self, commit: int, content: Any) -> None:
        """Starts to write a commit. `content` belongs to the writer from now on."""
        self._written = commit
        self._writer = threading.Thread(target=self._write, args=(content,), name="sirtaki checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Waits until a checkpoint that is being written is complete."""
        if self._writer is not None:
            self._writer.join()

    def newest(self) -> Any:
        """Returns the content of the newest checkpoint that can be read; None if there is none at all.

        Only rank 0 calls it, when no rank has a state; the others receive what it has read. A damaged file
        is reported on standard error, and the one before it is read. A file is unpickled, which may run code:
        no other user may be able to write it, or to put a name into the folder.

        Raises:
            HorovodInternalError: no checkpoint can be read, another user may have written one, or its format
                is another.
        """
        if self._folder.is_dir():
            _require_private(self._folder)
        failure: _UnreadableError | None = None
        for _, path in reversed(self._files()):
            try:
                content = _read(path)
                self._intact.add(path)
            except _UnreadableError as error:
                if failure is not None:
                    sys.stderr.write(f"sirtaki: {error}\n")
                failure = failure or error
                continue
            if failure is not None:
                sys.stderr.write(f"sirtaki: {failure}; the training starts from {path}, which is older\n")
            return content
        if failure is not None:
            raise HorovodInternalError(f"{failure}. Delete it to start from the beginning") from None
        return None

    def _write(self, content: Any) -> None:
        import cloudpickle

        number = 1 + max((number for number, _ in self._files()), default=0)
        path = self._folder / f"{number}.checkpoint"
        # A writer that was given up may wake up and write on: its file must be none of this one's.
        temporary = self._folder / f"{number}.{secrets.token_hex(8)}.new"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(self._folder)
            with open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b") as file:
                file.write(bytes(_HEADER.size))
                cloudpickle.dump(content, file)
                digest = _digest(file)
                file.seek(0)
                file.write(_HEADER.pack(_MAGIC, _FORMAT, digest))
                file.flush()
                os.fsync(file.fileno())
            self._fence()
            temporary.replace(path)
            _sync(self._folder)  # else a crash of the machine could undo the new name, and not the removals
            self._intact.add(path)
            for old in [*self._superseded(), *self._unfinished()]:
                old.unlink(missing_ok=True)
        except Exception as error:  # the training goes on without it
            sys.stderr.write(f"sirtaki: the checkpoint {path} could not be written: {error}\n")
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _superseded(self) -> list[Path]:
        """Returns the checkpoints before the two newest that can be read: damaged files do not count."""
        found = 0
        for index, (_, path) in reversed([*enumerate(self._files())]):
            if path in self._intact or _is_intact(path):
                self._intact.add(path)
                found += 1
            if found == _KEPT:
                return [path for _, path in self._files()[:index]]
        return []

    def _unfinished(self) -> list[Path]:
        """Returns the files that other writers have left behind: only the newest rank 0 writes."""
        return [self._folder / name for name in os.listdir(self._folder) if _UNFINISHED.fullmatch(name)]

    def _files(self) -> list[tuple[int, Path]]:
        """Returns the complete checkpoints, the newest last."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        found = [
            (int(match[1]), self._folder / name) for name in names if (match := _PATTERN.fullmatch(name))
        ]
        return sorted(found)


class _UnreadableError(Exception):
    """A checkpoint is damaged, or cannot be read; the text names it."""


def _require_private(folder: Path) -> None:
    """Raises HorovodInternalError if another user can put files, or links to files, into the folder."""
    if others_can_write(os.stat(folder)):
        raise HorovodInternalError(
            f"other users can put files into the folder of checkpoints {folder}, and reading such files "
            f"could run code: run `chmod go-w {folder}`, or name a folder of your own"
        )


def _open(path: Path) -> IO[bytes]:
    """Opens a checkpoint. Raises HorovodInternalError if another user may have written what would be read."""
    try:
        # Without O_NONBLOCK, a pipe of this name would block for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise HorovodInternalError(
                f"the checkpoint {path} is a link, and the file may be another user's: put the file there"
            ) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and not others_can_write(status):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise HorovodInternalError(
        f"the checkpoint {path} may have been written by another user: run `chmod go-w` on a copy of your own"
    )


def _read(path: Path) -> Any:
    """Returns the content of a checkpoint. Raises _UnreadableError, HorovodInternalError if refused."""
    try:
        with _open(path) as file:
            magic, form, digest = _HEADER.unpack(file.read(_HEADER.size))
            if magic != _MAGIC:
                raise ValueError("it does not begin as a checkpoint does")
            if form != _FORMAT:
                raise HorovodInternalError(
                    f"the checkpoint {path} has format {form}, and this sirtaki reads {_FORMAT}"
                )
            if _digest(file) != digest:
                raise ValueError("its bytes differ from those that were written")
            file.seek(_HEADER.size)
            return pickle.load(file)
    except HorovodInternalError:
        raise
    except Exception as error:  # a class of the user's that has changed makes pickle raise almost anything
        reason = f"{type(error).__name__}: {error}"
        raise _UnreadableError(f"the checkpoint {path} cannot be read: {reason}") from None


def _is_intact(path: Path) -> bool:
    """Returns whether a checkpoint has the bytes that were written."""
    with contextlib.suppress(OSError, struct.error, HorovodInternalError), _open(path) as file:
        magic, _, digest = _HEADER.unpack(file.read(_HEADER.size))
        return bool(magic == _MAGIC and digest == _digest(file))
    return False


def _digest(file: IO[bytes]) -> bytes:
    """Returns the digest of what follows the header."""
    file.seek(_HEADER.size)
    digest = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.digest()


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
