"""Python's functions for files, replaced so that a rank above 0 has private files (`private_files`).

The functions that are not replaced here, and native code that opens files by itself, use the files of the
host: docs/guide/auto.md names the important ones.
"""

from __future__ import annotations

import builtins
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any

from sirtaki.auto.private_files import PrivateFiles

Function = Callable[..., Any]
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SETS = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids)
_PUBLIC = {"posix": "os", "_io": "io"}  # where pickle finds a replacement
_UNCHANGED = ("posix", "_io", "importlib", "_frozen_importlib", "_frozen_importlib_external", "sirtaki")


def replace_functions(files: PrivateFiles) -> None:
    """Replaces the functions in `os`, `builtins` and `io`, and in modules that have taken them from there."""
    table = {original: partial(make, files, original) for original, make in _table().items()}
    by_id: dict[int, Function] = {}
    for original, call in table.items():
        by_id[id(original)] = replacement = _plain(original, call)
        for supported in _SETS:
            if original in supported:
                supported.add(replacement)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _UNCHANGED and module is not None:
            _replace_in_module(module, by_id)


def _table() -> dict[Function, Function]:
    """Returns for each function its replacement, which takes the files and the function as well."""
    return {
        builtins.open: _open_file,
        os.open: _open_descriptor,
        **{getattr(os, name): _read for name in ("stat", "access", "getxattr", "listxattr")},
        **{getattr(os, name): partial(_read, follows=False) for name in ("lstat", "readlink")},
        **{getattr(os, name): _change for name in ("chmod", "chown", "utime", "truncate")},
        **{getattr(os, name): _change for name in ("setxattr", "removexattr")},
        **{getattr(os, name): partial(_remove, is_folder=False) for name in ("unlink", "remove")},
        **{getattr(os, name): _move for name in ("rename", "replace")},
        os.rmdir: partial(_remove, is_folder=True),
        os.mkdir: _make_folder,
        os.link: _link,
        os.symlink: _make_link,
        os.listdir: _list,
        os.scandir: _scan,
        os.chdir: _enter_folder,
        os.getcwd: lambda files, _: files.folder(),
        os.getcwdb: lambda files, _: os.fsencode(files.folder()),
        os.system: _after_rank_0,
    }


def _plain(original: Function, call: Function) -> Function:
    """Returns a function with the original's name and text: a `partial` has neither."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    update_wrapper(replacement, original)
    replacement.__module__ = _PUBLIC.get(original.__module__, original.__module__)
    return replacement


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


# Replacements. Each takes the files, the original, and then the original's own arguments. Descriptors, and
# locations that all ranks share, pass unchanged.


def _after_rank_0(files: PrivateFiles, original: Function, *args: Any, **kwargs: Any) -> Any:
    files.wait_for_rank_0()
    return original(*args, **kwargs)


def _read(
    files: PrivateFiles, original: Function, path: Any, *args: Any, follows: bool = True, **kwargs: Any
) -> Any:
    follow = follows and kwargs.get("follow_symlinks", True)
    location = None if isinstance(path, int) else files.locate(path, kwargs.get("dir_fd"), follow)
    if location is None or not files.is_used:
        return original(path, *args, **kwargs)
    kwargs.pop("dir_fd", None)
    return _show(path, original, _like(path, files.find(location)), *args, **kwargs)


def _change(files: PrivateFiles, original: Function, path: Any, *args: Any, **kwargs: Any) -> Any:
    follow = kwargs.get("follow_symlinks", True)
    location = None if isinstance(path, int) else files.locate(path, kwargs.get("dir_fd"), follow)
    if location is None:
        return original(path, *args, **kwargs)
    kwargs.pop("dir_fd", None)
    return _show(path, original, files.prepare(location), *args, **kwargs)


def _open_file(
    files: PrivateFiles, original: Function, file: Any, mode: str = "r", *args: Any, **kwargs: Any
) -> Any:
    has_opener = kwargs.get("opener") is not None or len(args) == 6  # which opens the path by itself
    location = None if isinstance(file, int) or has_opener else files.locate(file)
    if location is None:
        return original(file, mode, *args, **kwargs)
    if "x" in mode:
        _refuse_existing(files, location, file)
    if any(letter in mode for letter in "wax+"):
        path = files.prepare(location, keeps="w" not in mode and "x" not in mode)
    else:
        path = files.find(location)
    return _show(file, original, path, mode, *args, **kwargs)


def _open_descriptor(
    files: PrivateFiles,
    original: Function,
    path: Any,
    flags: int,
    mode: int = 0o777,
    *,
    dir_fd: int | None = None,
) -> int:
    creates_alone = flags & os.O_CREAT and flags & os.O_EXCL
    location = files.locate(path, dir_fd, follow=not creates_alone and not flags & os.O_NOFOLLOW)
    if location is None:
        return original(path, flags, mode, dir_fd=dir_fd)
    if creates_alone:
        _refuse_existing(files, location, path)
    if flags & _WRITES:
        found = files.prepare(location, keeps=not flags & os.O_TRUNC and not creates_alone)
    else:
        found = files.find(location)
    return _show(path, original, found, flags, mode)


def _make_folder(
    files: PrivateFiles, original: Function, path: Any, mode: int = 0o777, *, dir_fd: int | None = None
) -> None:
    location = files.locate(path, dir_fd, follow=False)
    if location is None:
        return original(path, mode, dir_fd=dir_fd)
    _refuse_existing(files, location, path)
    return _show(path, original, files.prepare(location, keeps=False, of_folder=True), mode)


def _remove(
    files: PrivateFiles, original: Function, path: Any, *, dir_fd: int | None = None, is_folder: bool
) -> None:
    location = files.locate(path, dir_fd, follow=False)
    if location is None:
        return original(path, dir_fd=dir_fd)
    return _show(path, files.remove, location, is_folder)


def _move(
    files: PrivateFiles,
    original: Function,
    src: Any,
    dst: Any,
    *,
    src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None,
) -> None:
    source, target = (
        files.locate(src, src_dir_fd, follow=False),
        files.locate(dst, dst_dir_fd, follow=False),
    )
    if source is None and target is None:
        return original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
    if source is None:
        assert target is not None
        return _show(src, original, src, files.prepare(target, keeps=False), src_dir_fd=src_dir_fd)
    if target is not None:
        return _show(src, files.move, source, target)
    _show(src, original, files.prepare(source), dst, dst_dir_fd=dst_dir_fd)
    return files.hide(source)


def _link(
    files: PrivateFiles,
    original: Function,
    src: Any,
    dst: Any,
    *,
    src_dir_fd: int | None = None,
    dst_dir_fd: int | None = None,
    follow_symlinks: bool = True,
) -> None:
    """Makes a copy instead of a second name, for files of this rank's."""
    source = files.locate(src, src_dir_fd, follow=follow_symlinks)
    target = files.locate(dst, dst_dir_fd, follow=False)
    if target is None:
        found = src if source is None else files.find(source)
        folder = src_dir_fd if source is None else None
        return original(found, dst, src_dir_fd=folder, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
    _refuse_existing(files, target, src, dst)
    return _show(src, files.copy, os.fsdecode(src) if source is None else files.find(source), target)


def _make_link(
    files: PrivateFiles,
    original: Function,
    src: Any,
    dst: Any,
    target_is_directory: bool = False,
    *,
    dir_fd: int | None = None,
) -> None:
    location = files.locate(dst, dir_fd, follow=False)
    if location is None:
        return original(src, dst, target_is_directory, dir_fd=dir_fd)
    _refuse_existing(files, location, src, dst)
    return _show(dst, original, os.fsdecode(src), files.prepare(location, keeps=False))


def _list(files: PrivateFiles, original: Function, path: Any = None) -> list[Any]:
    location = _folder_of(files, path)
    if location is None:
        return original(path)
    names = _show(path, files.names, location)
    return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names


def _scan(files: PrivateFiles, original: Function, path: Any = None) -> Any:
    location = _folder_of(files, path)
    return (
        original(path)
        if location is None
        else Scan(files, location, path, _show(path, files.names, location))
    )


def _folder_of(files: PrivateFiles, path: Any) -> str | None:
    """Returns the location of a folder that is not the host's alone; None: it is."""
    location = files.locate(files.name_of(path) if isinstance(path, int) else "." if path is None else path)
    if location is None or not (files.has_private(location) or files.hides_in(location)):
        return None
    return location


def _enter_folder(files: PrivateFiles, original: Function, path: Any) -> None:
    location = None if isinstance(path, int) else files.locate(path)
    if location is None:
        return original(path)
    return _show(path, original, files.find_folder(location))


def _refuse_existing(files: PrivateFiles, location: str, *paths: Any) -> None:
    """Raises FileExistsError if a file is there. `paths` are the paths in the error: 1 or 2."""
    if files.is_obstacle(location):
        first, *second = paths
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), first, None, *second)


def _like(path: Any, text: str) -> Any:
    return os.fsencode(text) if isinstance(path, bytes) else text


def _show(path: Any, function: Function, *args: Any, **kwargs: Any) -> Any:
    """Calls a function; an error names the path that the script has given."""
    try:
        return function(*args, **kwargs)
    except OSError as error:
        error.filename = path
        raise


# ---- `os.scandir` for folders with files in both layers (`private_files`) ------------------------------


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
