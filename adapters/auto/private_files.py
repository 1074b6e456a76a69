"""The files that a rank above 0 sees: the host's, overlaid by its own, which no other rank sees.

Every rank runs the same script and writes the same files. Rank 0's files are the results; the other ranks'
would only disturb it. A rank above 0 therefore writes into a private folder, under the path that the file has
otherwise, and finds there what it has written. Nothing of the host's is changed or removed: a removed file is
hidden from this rank.

Python's functions for files, and functions of libraries with native code, receive the paths of these files.
An audit hook refuses changes of the host's files by Python's other functions. Native code that opens files by
itself uses those of the host: docs/guide/auto.md names the important libraries.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from sirtaki.auto.gate import Gate, is_import
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.observing.user_code import user_line

Function = Callable[..., Any]

_MAX_LINKS = 40
_DEVICES = ("/dev", "/proc", "/sys")
_SYSTEM = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/sbin", "/usr")  # files that no script prepares
_VARIABLES = ("SIRTAKI_DUMP_DIRECTORY", "SIRTAKI_TIMELINE")  # of files that sirtaki itself writes


class Use(Enum):
    """The purpose for which a function uses a file or a folder."""

    READ = auto()
    READ_LINK = auto()  # READ, but of a link the link itself
    CHANGE = auto()
    REPLACE = auto()  # write it anew
    CREATE = auto()  # fails if it exists
    REMOVE = auto()
    REMOVE_FOLDER = auto()
    MOVE = auto()
    COVER = auto()  # move another file or folder to its path


_FOLLOWING = (Use.READ, Use.CHANGE, Use.REPLACE)  # a link at the end of a path
_HIDING = (Use.REMOVE, Use.REMOVE_FOLDER, Use.MOVE, Use.COVER)  # the host's file, afterwards


class PrivateFiles:
    """The two layers of files, private over the host's, and the host's files that are hidden.

    A *location* is the absolute path of a file as the script sees it, without links. Except `direct`, methods
    are called inside of `direct`.
    """

    def __init__(self, rank: int, began: int, gate: Gate) -> None:
        """Begins with no private files, in a folder that belongs to this user alone.

        Args:
            rank: this rank.
            began: when rank 0 began, in nanoseconds: what it has made since is no obstacle to this rank.
            gate: opens when rank 0 has prepared its data.
        """
        self.rank, self.gate, self._began = rank, gate, began
        self.root = os.path.join(_job_folder(), f"rank{rank}")
        os.mkdir(self.root, 0o700)
        own = [os.path.realpath(variable) for variable in map(os.environ.get, _VARIABLES) if variable]
        self._always_shared = (_job_folder(), *_DEVICES, *own)
        self._temporary = os.path.realpath(tempfile.gettempdir())
        # Files in the working folder are private even if it is in that of temporary files.
        working = os.path.realpath(os.getcwd())
        self._working = (working,) if working.startswith(f"{self._temporary}/") else ()
        prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
        self._installed = (*_SYSTEM, *map(os.path.realpath, prefixes))
        self._hidden: set[str] = set()
        self._thread = threading.local()

    @property
    def is_direct(self) -> bool:
        """Returns whether functions of this thread are not redirected."""
        return getattr(self._thread, "is_direct", False)

    @contextmanager
    def direct(self, given: Mapping[Any, Any]) -> Iterator[None]:
        """Makes functions use the paths that they receive. Errors name the `given` paths in their place."""
        self._thread.is_direct = True
        try:
            yield
        except OSError as error:
            error.filename = given.get(error.filename, error.filename)
            if error.filename2 is not None:
                error.filename2 = given.get(error.filename2, error.filename2)
            raise
        finally:
            self._thread.is_direct = False

    # Names

    def locate(self, path: str, follow: bool = True) -> str:
        """Returns the location of an absolute path; `follow`: also of a link at its end. Waits for rank 0."""
        location = self._resolved(self.seen(path), follow)
        if not (self.gate.is_open or self.is_shared(location) or _is_below(location, self._installed)):
            self.gate.pass_through()
        return location

    def seen(self, path: str) -> str:
        """Returns a path as the script sees it."""
        return path.removeprefix(self.root) or "/" if _is_below(path, (self.root,)) else path

    def is_shared(self, location: str) -> bool:
        """Returns whether all ranks use the host's file at a location."""
        if _is_below(location, self._always_shared):
            return True
        if _is_below(location, (self._temporary,)) and not _is_below(location, self._working):
            return True
        mode = _mode(location)  # of devices, pipes and sockets
        return mode != 0 and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))

    def _resolved(self, path: str, follow: bool = True, links: int = 0) -> str:
        folder, _, name = path.rstrip("/").rpartition("/")
        if not name:
            return "/"
        parent = self._resolved(folder, links=links)
        if name in (".", ".."):
            return parent if name == "." else os.path.dirname(parent)
        location = os.path.join(parent, name)
        if not follow or not stat.S_ISLNK(_mode(self.find(location))):
            return location
        if links == _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return self._resolved(os.path.join(parent, os.readlink(self.find(location))), links=links + 1)

    # Reading

    def find(self, location: str) -> str:
        """Returns the path from which a file is read; a path in the private folder if it is hidden."""
        private = self.root + location
        return private if _mode(private) or self.is_hidden(location) else location

    def is_hidden(self, location: str) -> bool:
        """Returns whether a file of the host's, or a folder with it, is hidden."""
        while self._hidden and location:
            if location in self._hidden:
                return True
            location = location.rpartition("/")[0]
        return False

    def has_layers(self, location: str) -> bool:
        """Returns whether the names in a folder are not only the host's."""
        below = f"{location}/"
        return self.find(location) != location or any(path.startswith(below) for path in self._hidden)

    def names(self, location: str) -> list[str]:
        """Returns the names in a folder of both layers. Raises OSError if there is none."""
        hosts = [] if self.is_hidden(location) else [location]
        layers = [layer for layer in (*hosts, self.root + location) if os.path.isdir(layer)]
        names = [
            name
            for layer in layers or [self.find(location)]
            for name in os.listdir(layer)
            if layer != location or os.path.join(location, name) not in self._hidden
        ]
        return list(dict.fromkeys(names))

    # Writing

    def path(self, location: str, use: Use) -> str:
        """Returns the path with which a function is called: a private path, unless the function reads.

        What the host has at this location is copied, as far as the function needs it: if it fails for what is
        there, it fails for the copy.
        """
        source, private = self.find(location), self.root + location
        if use in (Use.READ, Use.READ_LINK):
            return source
        parent = os.path.dirname(location)
        if stat.S_ISDIR(_mode(self.find(parent))):
            os.makedirs(self.root + parent, exist_ok=True)
        # Rank 0 runs the same lines, perhaps before: what it has made since the job began is no obstacle.
        is_new = source == location and _mode(source) and os.lstat(source).st_ctime_ns > self._began
        if not _mode(source) or (is_new and use in (Use.CREATE, Use.COVER)):
            return private
        if stat.S_ISDIR(_mode(source)):
            os.makedirs(private, exist_ok=True)
            if use in (Use.MOVE, Use.COVER, Use.REMOVE_FOLDER):
                for name in self.names(location)[: None if use is Use.MOVE else 1]:
                    self.path(os.path.join(location, name), Use.MOVE)
        elif source == location and use is Use.REMOVE:
            open(private, "wb").close()
        elif source == location and use not in (Use.REPLACE, Use.COVER):
            shutil.copy2(source, private, follow_symlinks=False)
        return private

    def hide(self, location: str) -> None:
        """Makes a file or folder of the host's invisible to this rank."""
        self._hidden.add(location)


def _job_folder() -> str:
    """Returns the folder of the job, with the key in it, which hvdrun has made and its reaper removes."""
    key_file = os.environ.get("SIRTAKI_KEY_FILE")
    if os.environ.get("SIRTAKI_LAUNCHER") != "hvdrun" or not key_file:
        raise UnsupportedError("sirtaki.auto needs the folder of a job: start the script by hvdrun --auto")
    return os.path.dirname(os.path.realpath(key_file))


def _mode(path: str) -> int:
    """Returns type and permissions of a file, of a link itself; 0 if there is none."""
    try:
        return os.lstat(path).st_mode
    except (OSError, ValueError):
        return 0


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


# ---- Functions that receive the paths of these files ---------------------------------------------------


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SETS = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids)
_PUBLIC = {"posix": "os", "_io": "io"}  # where pickle finds a replacement
_UNCHANGED = ("posix", "_io", "importlib", "_frozen_importlib", "_frozen_importlib_external", "sirtaki")


class _Argument(NamedTuple):
    """A parameter of a function that is a path.

    Attributes:
        position, keyword: where it is in a call.
        use: what the function does with the file, or how another argument tells it: position, name, function.
        folder: the name of a parameter with the descriptor of a folder to which the path is relative.
    """

    position: int
    keyword: str
    use: Use | tuple[int, str, Callable[[Any], Use | None]]
    folder: str = "dir_fd"


def _use_of_mode(mode: str | None) -> Use:
    letters = set(mode or "r")
    if letters & {"x", "-"}:
        return Use.CREATE
    return Use.REPLACE if "w" in letters else Use.CHANGE if letters & {"a", "+"} else Use.READ


def _use_of_flags(flags: int) -> Use:
    if flags & os.O_CREAT and flags & os.O_EXCL:
        return Use.CREATE
    if flags & _WRITES:
        return Use.REPLACE if flags & os.O_TRUNC else Use.CHANGE
    return Use.READ_LINK if flags & os.O_NOFOLLOW else Use.READ


def _use_of_database(name: Any) -> Use | None:
    return None if str(name) in ("", ":memory:") or str(name).startswith("file:") else Use.CHANGE


_USES: dict[Use, tuple[str, ...]] = {  # functions of `os` with one path
    Use.READ: ("stat", "access", "getxattr", "listxattr"),
    Use.READ_LINK: ("lstat", "readlink"),
    Use.CHANGE: ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr"),
    Use.CREATE: ("mkdir",),
    Use.REMOVE: ("unlink", "remove"),
    Use.REMOVE_FOLDER: ("rmdir",),
}
_MOVED = (_Argument(0, "src", Use.MOVE, "src_dir_fd"), _Argument(1, "dst", Use.COVER, "dst_dir_fd"))
_DATABASE = _Argument(0, "database", (0, "database", _use_of_database))
# Libraries with native code that opens files by itself: module, function, parameter.
_LIBRARIES = (
    ("torch", "save", _Argument(1, "f", Use.REPLACE)),
    ("torch", "load", _Argument(0, "f", Use.READ)),
    ("h5py", "File.__init__", _Argument(1, "name", (2, "mode", _use_of_mode))),
    ("safetensors.torch", "save_file", _Argument(1, "filename", Use.REPLACE)),
    ("safetensors.torch", "load_file", _Argument(0, "filename", Use.READ)),
    ("safetensors.numpy", "save_file", _Argument(1, "filename", Use.REPLACE)),
    ("safetensors.numpy", "load_file", _Argument(0, "filename", Use.READ)),
    ("sqlite3", "connect", _DATABASE),
    ("sqlite3.dbapi2", "connect", _DATABASE),
)


def redirect(files: PrivateFiles) -> dict[str, Hook]:
    """Redirects Python's functions to these files, and refuses changes by functions that are not redirected.

    The functions are replaced in `os`, `builtins` and `io`, and in modules that have taken them from there.
    Returns what has to follow the import of libraries.
    """
    by_id = {id(original): replacement for original, replacement in _replacements(files).items()}
    for supported in _SETS:
        supported.update([by_id[id(function)] for function in supported if id(function) in by_id])
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _UNCHANGED and module is not None:
            _replace_in_module(module, by_id)

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _WATCHED:  # most events are calls of id() and sys._getframe(), which training code makes
            _audit(files, event, arguments)

    sys.addaudithook(audited)
    return {name: partial(_redirect_library, files) for name, _, _ in _LIBRARIES}


def _replacements(files: PrivateFiles) -> dict[Function, Function]:
    """Returns for each function its replacement."""
    arguments: dict[Function, Sequence[_Argument]] = {
        builtins.open: (_Argument(0, "file", (1, "mode", _use_of_mode)),),
        os.open: (_Argument(0, "path", (1, "flags", _use_of_flags)),),
        os.symlink: (_Argument(1, "dst", Use.CREATE),),
        os.rename: _MOVED,
        os.replace: _MOVED,
    }
    for use, names in _USES.items():
        arguments |= {getattr(os, name): (_Argument(0, "path", use),) for name in names}
    calls: dict[Function, Function] = {
        original: partial(call, files, original)
        for original, call in (
            *((os.listdir, _list), (os.scandir, _scan), (os.chdir, _enter_folder)),
            *((os.getcwd, _current_folder), (os.getcwdb, _current_folder)),
        )
    }
    return {
        **{original: _redirected(files, original, paths) for original, paths in arguments.items()},
        **{original: _in_place_of(files, original, call) for original, call in calls.items()},
    }


def _in_place_of(files: PrivateFiles, original: Function, call: Function) -> Function:
    """Returns a function with the original's name, for pickle; it is the original where paths are direct."""

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return (original if files.is_direct else call)(*args, **kwargs)

    replacement.__module__ = _PUBLIC.get(original.__module__, original.__module__)
    return replacement


def _redirected(files: PrivateFiles, original: Function, arguments: Sequence[_Argument]) -> Function:
    """Returns a function that is called with the paths of this rank's files.

    Descriptors, and locations that all ranks share, pass unchanged.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("opener") is not None:  # it opens a path of its own
            return original(*args, **kwargs)
        values, given, hidden = list(args), dict[Any, Any](), []
        with files.direct(given):
            for argument in arguments:
                path, use = _value(argument.position, argument.keyword, args, kwargs), argument.use
                purpose = use if isinstance(use, Use) else use[2](_value(use[0], use[1], args, kwargs))
                if purpose is None or not isinstance(path, str | bytes | os.PathLike):
                    continue
                absolute = os.path.join(_path_of(kwargs.get(argument.folder)), os.fsdecode(path))
                follow = purpose in _FOLLOWING and kwargs.get("follow_symlinks", True)
                found = location = files.locate(absolute, follow)
                if not files.is_shared(location):
                    found = files.path(location, purpose)
                    hidden += [location] if purpose in _HIDING else []
                if found == location and files.seen(absolute) == absolute:
                    continue  # the host's file, as the script names it
                given[found] = path
                kwargs.pop(argument.folder, None)
                value = os.fsencode(found) if isinstance(path, bytes) else found
                if len(args) > argument.position:
                    values[argument.position] = value
                else:
                    kwargs[argument.keyword] = value
            result = original(*values, **kwargs)
        for location in hidden:
            files.hide(location)
        return result

    return _in_place_of(files, original, call)


def _value(position: int, keyword: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[position] if len(args) > position else kwargs.get(keyword)


def _path_of(folder: int | None) -> str:
    """Returns the path of an open folder; of the working folder without a descriptor."""
    return os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")


def _replace_in_module(module: Any, by_id: dict[int, Function]) -> None:
    for attribute, value in list(vars(module).items()):
        if id(value) in by_id:
            setattr(module, attribute, by_id[id(value)])
        elif isinstance(value, type) and value.__module__ == module.__name__:
            _replace_in_class(value, by_id)


def _replace_in_class(owner: type, by_id: dict[int, Function]) -> None:
    """Replaces functions that a class has kept as attributes, or as defaults of parameters."""
    for attribute, value in list(vars(owner).items()):
        plain = value.__func__ if isinstance(value, staticmethod) else value
        if id(plain) in by_id:
            setattr(owner, attribute, staticmethod(by_id[id(plain)]))
        elif isinstance(value, FunctionType) and value.__defaults__:
            value.__defaults__ = tuple(by_id.get(id(default), default) for default in value.__defaults__)


def _redirect_library(files: PrivateFiles, module: ModuleType) -> None:
    for name, function, argument in _LIBRARIES:
        if name == module.__name__:
            owner, _, attribute = function.rpartition(".")
            place: Any = getattr(module, owner) if owner else module
            setattr(place, attribute, _redirected(files, getattr(place, attribute), [argument]))


# Functions for folders


def _current_folder(files: PrivateFiles, original: Function) -> Any:
    path = files.seen(os.fsdecode(original()))
    return os.fsencode(path) if original.__name__ == "getcwdb" else path


def _enter_folder(files: PrivateFiles, original: Function, path: Any) -> None:
    if isinstance(path, int):
        return original(path)
    given = dict[Any, Any]()
    with files.direct(given):
        location = files.locate(os.path.join(os.getcwd(), os.fsdecode(path)))
        # The host's folder, if it exists, because native code finds its files.
        is_hosts = os.path.isdir(location) and not files.is_hidden(location)
        found = location if is_hosts or files.is_shared(location) else files.find(location)
        given[found] = path
        return original(found)


def _list(files: PrivateFiles, original: Function, path: Any = None) -> list[Any]:
    given = dict[Any, Any]()
    with files.direct(given):
        location = _location_of(files, path)
        if location is None:
            return original(path)
        given[files.find(location)] = path
        names = files.names(location)
    return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names


def _scan(files: PrivateFiles, original: Function, path: Any = None) -> Any:
    with files.direct({}):
        location = _location_of(files, path)
        if location is None:
            return original(path)
    return _Scan(partial(_FolderEntry, location, path), _list(files, original, path))


def _location_of(files: PrivateFiles, path: Any) -> str | None:
    """Returns the location of a folder to list; None if the host's is listed as the script names it."""
    is_open = isinstance(path, int)
    absolute = _path_of(path) if is_open else os.path.join(os.getcwd(), os.fsdecode(path or "."))
    location = files.locate(absolute)
    is_hosts = files.is_shared(location) or not files.has_layers(location)
    return None if is_hosts and files.seen(absolute) == absolute else location


class _Scan(map):
    """Entries of a folder: an iterator and a context, as `os.scandir` returns it."""

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iteration."""
        list(self)


class _FolderEntry:
    """An entry of a folder, with the attributes of `os.DirEntry`."""

    def __init__(self, location: str, folder: Any, name: Any) -> None:
        """`folder` is the folder as the script names it: a path, a descriptor, or None."""
        self._path = os.path.join(location, os.fsdecode(name))
        self.name = name
        self.path = name if isinstance(folder, int) else os.path.join(os.fspath(folder or "."), name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return os.lstat(self._path).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self._path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self._path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        return os.path.islink(self._path)


# ---- Functions that are not redirected -----------------------------------------------------------------


_CHANGES = {  # audit events of changes, and the positions of the paths
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate"), slice(0, 1)),
    **dict.fromkeys(("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr"), slice(0, 1)),
    **dict.fromkeys(("os.link", "os.symlink"), slice(1, 2)),
    "os.rename": slice(0, 2),
}
_STARTS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_WATCHED = {"open", *_CHANGES, *_STARTS}


def _audit(files: PrivateFiles, event: str, arguments: tuple[Any, ...]) -> None:
    """Refuses changes of the host's files; new processes, such as downloads, wait for rank 0's data."""
    if event in _STARTS:
        files.gate.pass_through()
        return
    changed = arguments[_CHANGES[event]] if event in _CHANGES else ()
    if event == "open" and arguments[2] & _WRITES:
        changed = arguments[:1]
    for path in changed:
        if isinstance(path, str | bytes | os.PathLike) and not files.is_direct and not is_import():
            _check_change(files, event, os.fsdecode(path))


def _check_change(files: PrivateFiles, event: str, path: str) -> None:
    """Raises UnsupportedError if a function that is not redirected is about to change the host's file."""
    with files.direct({}):
        absolute = os.path.join(os.getcwd(), path)
        is_own = files.seen(absolute) != absolute or files.is_shared(files.locate(absolute))
        # A folder cannot be written; tempfile names one to `open`, with an opener that chooses the file.
        if is_own or (event == "open" and os.path.isdir(absolute)):
            return
    raise UnsupportedError(
        f"{user_line()}: {event} changes {absolute!r} on rank {files.rank}, but only rank 0 may change files "
        "of the host, and --auto cannot give this function a file of the rank's own: use open() and the "
        "functions of os, shutil and pathlib, without opener= and hard links"
    )


# ---- Actions that follow the script's own import of a library, at once and before the script uses it ---


Hook = Callable[[ModuleType], None]


def call_after_imports(hooks: Mapping[str, Sequence[Hook]]) -> None:
    """Calls hooks when their modules have been imported; now, for modules that have been."""
    waiting = {name: list(actions) for name, actions in hooks.items()}
    for name in [name for name in waiting if name in sys.modules]:
        for hook in waiting.pop(name):
            hook(sys.modules[name])
    sys.meta_path.insert(0, _Finder(waiting))


class _Finder(MetaPathFinder):
    """Finds modules as the other finders do, and adds the hooks to the execution of some of them."""

    def __init__(self, waiting: dict[str, list[Hook]]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._call_afterwards(spec.loader, fullname)
                return spec
        return None

    def _call_afterwards(self, loader: Any, name: str) -> None:
        """Makes this loader call the hooks when it has executed the module; it keeps its class."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            for hook in self._waiting.pop(name, ()):
                hook(module)

        loader.exec_module = exec_module
