"""The files that a rank above 0 sees: the host's, overlaid by its own, which no other rank sees.

Every rank runs the same script and writes the same files. Rank 0's files are the results; the other ranks'
would only disturb it. A rank above 0 therefore writes into a private folder, under the path that the file has
otherwise, and finds there what it has written. Nothing of the host's is changed or removed: a removed file is
hidden from this rank. `file_functions` redirects Python's functions to these files.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from sirtaki.auto.gate import Gate
from sirtaki.auto.hooks import Hook

_MAX_LINKS = 40
_DEVICES = ("/dev", "/proc", "/sys")
_SYSTEM = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/sbin", "/usr")  # files that no script prepares
_VARIABLES = ("SIRTAKI_DUMP_DIRECTORY", "SIRTAKI_TIMELINE")  # of files that sirtaki itself writes


class _Functions(NamedTuple):
    """Python's own functions, as they were before `file_functions` replaced them."""

    open: Any
    lstat: Any
    readlink: Any
    listdir: Any
    mkdir: Any
    unlink: Any
    rmdir: Any
    rename: Any
    symlink: Any
    getcwd: Any
    chmod: Any
    utime: Any
    scandir: Any


_host = _Functions(
    *(open, os.lstat, os.readlink, os.listdir, os.mkdir, os.unlink, os.rmdir, os.rename),
    *(os.symlink, os.getcwd, os.chmod, os.utime, os.scandir),
)


def private_folder(rank: int) -> str:
    """Creates this rank's folder: in that of the job, which hvdrun removes, or in that of temporary files."""
    job = _job_folder()
    path = os.path.join(job, f"rank{rank}") if job else tempfile.mkdtemp(prefix=f"sirtaki-rank{rank}-")
    if job:
        os.mkdir(path, 0o700)
    atexit.register(_remove, path, os.getpid())
    return os.path.realpath(path)


def _job_folder() -> str | None:
    """Returns the folder that hvdrun has made for the job, with the key in it; None without hvdrun."""
    key_file = os.environ.get("SIRTAKI_KEY_FILE")
    is_ours = os.environ.get("SIRTAKI_LAUNCHER") == "hvdrun" and key_file
    return os.path.dirname(os.path.realpath(key_file)) if key_file and is_ours else None


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError):  # the reaper of the job removes the rest
            _remove_tree(path)


def _remove_tree(path: str) -> None:
    """Removes a private folder with the host's functions: the replaced functions would map it elsewhere."""
    for entry in list(_host.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            _remove_tree(entry.path)
        else:
            _host.unlink(entry.path)
    _host.rmdir(path)


class PrivateFiles:
    """The two layers of files, private over the host's, and the host's files that are hidden.

    A *location* is the absolute path of a file as the script sees it, without links.
    """

    def __init__(self, root: str, folder: str, began: int, gate: Gate) -> None:
        """Begins with no private files.

        Args:
            root: the private folder.
            folder: the working folder, whose files are private even if it is in that of temporary files.
            began: when rank 0 began, in nanoseconds: what it has made since is no obstacle to this rank.
        """
        self.root = root
        self._began = began
        self._gate = gate
        self._own_folder = os.path.realpath(folder)
        own = [os.path.realpath(variable) for variable in map(os.environ.get, _VARIABLES) if variable]
        self._always_shared = (_job_folder() or root, *_DEVICES, *own)
        self._temporary = os.path.realpath(tempfile.gettempdir())
        prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
        self._installed = (*_SYSTEM, *map(os.path.realpath, prefixes))
        self._hidden: set[str] = set()
        self.is_used = False  # whether this rank has written or removed anything

    # Names

    def locate(self, path: Any, folder: int | None = None, follow: bool = True) -> str | None:
        """Returns the location of a path; None if all ranks share the files there.

        Args:
            path: text, bytes or an object with a path.
            folder: the descriptor of an open folder to which the path is relative.
            follow: whether a link at the end of the path is followed.
        """
        location = self._without_links(self._absolute(os.fsdecode(path), folder), follow)
        if self._is_shared(location):
            return None
        if not self._gate.is_open and not _is_below(location, self._installed):
            self.wait_for_rank_0()
        return location

    def wait_for_rank_0(self) -> None:
        """Waits until rank 0 has prepared its data."""
        self._gate.pass_through()

    def _absolute(self, path: str, folder: int | None) -> str:
        if not path.startswith("/"):
            path = f"{self.folder() if folder is None else self.name_of(folder)}/{path}"
        return path.removeprefix(self.root) if _is_below(path, (self.root,)) else path

    def folder(self) -> str:
        """Returns the current folder, as the script sees it."""
        path: str = _host.getcwd()
        return path.removeprefix(self.root) or "/" if _is_below(path, (self.root,)) else path

    def name_of(self, descriptor: int) -> str:
        """Returns the path of an open folder, as the script sees it."""
        path: str = _host.readlink(f"/proc/self/fd/{descriptor}")
        return path.removeprefix(self.root) or "/" if _is_below(path, (self.root,)) else path

    def _is_shared(self, location: str) -> bool:
        if _is_below(location, self._always_shared):
            return True
        is_temporary = _is_below(location, (self._temporary,))
        if is_temporary and _is_below(self._own_folder, (self._temporary,)):
            is_temporary = self._own_folder == self._temporary or not _is_below(location, (self._own_folder,))
        return is_temporary or self._is_special(location)

    def _is_special(self, location: str) -> bool:
        """Returns whether the host has a device, a pipe or a socket there."""
        status = _status(location)
        return status is not None and not (
            stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)
        )

    def _without_links(self, path: str, follow: bool) -> str:
        pending, location, links = path.split("/")[::-1], "", 0
        while pending:
            name = pending.pop()
            if name in ("", "."):
                continue
            if name == "..":
                location = location.rpartition("/")[0]
                continue
            here = f"{location}/{name}"
            target = self._target(here) if any(pending) or follow else None
            if target is None:
                location = here
                continue
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            location = "" if target.startswith("/") else location
            pending += target.split("/")[::-1]
        return location or "/"

    def _target(self, location: str) -> str | None:
        try:
            return _host.readlink(self.find(location))
        except OSError:
            return None

    # Reading

    def find(self, location: str) -> str:
        """Returns the path from which a file is read; a path in the private folder if no such file exists."""
        if not self.is_used:
            return location
        private = self.private(location)
        return private if _status(private) is not None or self._is_hidden(location) else location

    def private(self, location: str) -> str:
        """Returns the path that a file has in the private folder."""
        return self.root + location

    def find_folder(self, location: str) -> str:
        """Returns the path of a folder: the host's, if it exists, because native code finds its files."""
        status = None if self._is_hidden(location) else _status(location)
        return location if status is not None and stat.S_ISDIR(status.st_mode) else self.find(location)

    def status(self, location: str) -> os.stat_result | None:
        """Returns the status of a file, of a link itself; None if there is no such file."""
        return _status(self.find(location))

    def has_private(self, location: str) -> bool:
        """Returns whether this rank has written there: a folder may then have files in both layers."""
        return self.is_used and (self._is_hidden(location) or _status(self.private(location)) is not None)

    def hides_in(self, location: str) -> bool:
        """Returns whether anything in a folder of the host's is hidden."""
        return any(hidden.startswith(f"{location}/") for hidden in self._hidden)

    def names(self, location: str) -> list[str]:
        """Returns the names in a folder of both layers. Raises OSError if there is none."""
        found: dict[str, None] = {}
        if not self._is_hidden(location):
            with_errors = _status(self.private(location)) is None
            for name in self._listed(location, with_errors):
                if f"{location.rstrip('/')}/{name}" not in self._hidden:
                    found[name] = None
        if self.has_private(location):
            found |= dict.fromkeys(_host.listdir(self.private(location)))
        return list(found)

    def _listed(self, path: str, with_errors: bool) -> list[str]:
        try:
            return list(_host.listdir(path))
        except OSError:
            if with_errors:
                raise
            return []

    def _is_hidden(self, location: str) -> bool:
        while self._hidden and location:
            if location in self._hidden:
                return True
            location = location.rpartition("/")[0]
        return False

    # Writing

    def is_obstacle(self, location: str) -> bool:
        """Returns whether something exists already that this rank is to create.

        Rank 0 runs the same lines, perhaps before: what it has made since the job began is none.
        """
        status = self.status(location)
        if status is None:
            return False
        return self.find(location) != location or status.st_ctime_ns <= self._began

    def prepare(self, location: str, keeps: bool = True, of_folder: bool = False) -> str:
        """Returns the private path for writing.

        Args:
            location: the location of a file, or of a folder that exists.
            keeps: whether the file there begins with the host's content.
            of_folder: whether the path is for a folder that is to be made.
        """
        private, source = self.private(location), self.find(location)
        status = _status(source)
        parent = location.rpartition("/")[0] or "/"
        if self._is_folder(parent):
            self._make_folders(parent)
        self.is_used = True
        if source == location and status is not None and not of_folder:
            if stat.S_ISDIR(status.st_mode):
                self._make_folders(location)
            elif keeps:
                self._copy(location, private, status)
        return private

    def hide(self, location: str) -> None:
        """Makes a file of the host's invisible to this rank."""
        if _status(location) is not None and not self._is_hidden(location):
            self.is_used = True
            self._hidden.add(location)

    def remove(self, location: str, is_folder: bool) -> None:
        """Removes a file, or an empty folder, of both layers. Raises OSError as the system does."""
        source = self.find(location)
        status = _status(source)
        if status is not None and stat.S_ISDIR(status.st_mode) != is_folder:
            code = errno.ENOTDIR if is_folder else errno.EISDIR
            raise OSError(code, os.strerror(code), location)
        if status is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), location)
        if is_folder and self.names(location):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), location)
        if source != location:
            (_host.rmdir if is_folder else _host.unlink)(source)
        self.hide(location)

    def move(self, source: str, target: str) -> None:
        """Renames a file or folder; both locations are this rank's. Raises OSError as the system does."""
        status, found = self.status(source), self.find(source)
        if status is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder and self._is_folder(target) and self.names(target):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        if self.status(target) is not None and self._is_folder(target) != is_folder:
            code = errno.ENOTDIR if is_folder else errno.EISDIR
            raise OSError(code, os.strerror(code), target)
        if is_folder:
            self._copy_tree_up(source)
            found = self.private(source)
        elif found == source:
            found = self.prepare(source)
        self.prepare(target, keeps=False)
        _host.rename(found, self.private(target))
        self.hide(source)
        if is_folder:
            self._hidden = {hidden for hidden in self._hidden if not hidden.startswith(f"{source}/")}
            self.hide(target)

    def copy(self, path: str, location: str) -> None:
        """Writes a copy of a file. Raises OSError."""
        self._copy(path, self.prepare(location, keeps=False), _host.lstat(path))

    def _copy_tree_up(self, location: str) -> None:
        self.prepare(location)
        for name in self.names(location):
            inner = f"{location}/{name}"
            if self._is_folder(inner):
                self._copy_tree_up(inner)
            else:
                self.prepare(inner)

    def _is_folder(self, location: str) -> bool:
        status = self.status(location)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def _make_folders(self, location: str) -> None:
        """Creates the private folder of a location, and the folders above it."""
        if _status(self.private(location)) is None:
            self._make_folders(location.rpartition("/")[0])
            _host.mkdir(self.private(location))
        self.is_used = True

    def _copy(self, source: str, target: str, status: os.stat_result) -> None:
        if stat.S_ISLNK(status.st_mode):
            _host.symlink(_host.readlink(source), target)
            return
        with _host.open(source, "rb") as reader, _host.open(target, "wb") as writer:
            shutil.copyfileobj(reader, writer)
        _host.chmod(target, stat.S_IMODE(status.st_mode))
        _host.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _status(path: str) -> os.stat_result | None:
    try:
        return _host.lstat(path)
    except (OSError, ValueError):
        return None


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


# ---- Libraries whose native code opens files by itself: their functions get the private paths ----------


class _Row(NamedTuple):
    """A function of a library, and its parameter that is a path.

    Attributes:
        keeps: whether a file that is written begins with its old content.
        modes: the position of the parameter with the mode, as `open` has it; -1: there is none.
    """

    module: str
    function: str  # or a class and its method
    position: int
    keyword: str
    writes: bool = False
    keeps: bool = False
    modes: int = -1


_TABLE = (
    _Row("torch", "save", 1, "f", writes=True),
    _Row("torch", "load", 0, "f"),
    _Row("h5py", "File.__init__", 1, "name", modes=2),
    _Row("safetensors.torch", "save_file", 1, "filename", writes=True),
    _Row("safetensors.torch", "load_file", 0, "filename"),
    _Row("safetensors.numpy", "save_file", 1, "filename", writes=True),
    _Row("safetensors.numpy", "load_file", 0, "filename"),
    _Row("sqlite3", "connect", 0, "database", writes=True, keeps=True),
)


def hooks(files: PrivateFiles) -> dict[str, Hook]:
    """Returns what has to follow the import of these libraries."""
    found: dict[str, Hook] = {row.module: functools.partial(_replace, files) for row in _TABLE}
    return found | {"subprocess": functools.partial(_start_after_rank_0, files)}


def _replace(files: PrivateFiles, module: ModuleType) -> None:
    for row in _TABLE:
        if row.module == module.__name__:
            owner_name, _, name = row.function.rpartition(".")
            owner: Any = getattr(module, owner_name) if owner_name else module
            setattr(owner, name, _with_private_paths(files, row, getattr(owner, name)))


def _with_private_paths(files: PrivateFiles, row: _Row, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        path = given[row.position] if len(given) > row.position else kwargs.get(row.keyword)
        location = _location(files, path)
        if location is None:
            return original(*args, **kwargs)
        mode = given[row.modes] if len(given) > row.modes > 0 else kwargs.get("mode", "r")
        if row.writes or (row.modes > 0 and mode not in ("r", None)):
            changes = row.modes > 0 and not str(mode).startswith(("w", "x"))
            found = files.prepare(location, keeps=row.keeps or changes)
        else:
            found = files.find(location)
        if len(given) > row.position:
            given[row.position] = found
        else:
            kwargs[row.keyword] = found
        return original(*given, **kwargs)

    return call


def _location(files: PrivateFiles, path: Any) -> str | None:
    """Returns the location of a path; None for other objects, and for databases that are no files."""
    if not isinstance(path, str | bytes | os.PathLike) or str(path) in ("", ":memory:"):
        return None
    return None if str(path).startswith("file:") else files.locate(path)


def _start_after_rank_0(files: PrivateFiles, module: ModuleType) -> None:
    """Makes new processes, such as downloads of data, wait until rank 0 has prepared its data."""
    processes: Any = module
    original = processes.Popen.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        files.wait_for_rank_0()
        original(self, *args, **kwargs)

    processes.Popen.__init__ = __init__
