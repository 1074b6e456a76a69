"""Libraries whose native code opens files by itself: their functions get the private paths."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from sirtaki.auto.hooks import Hook
from sirtaki.auto.private_files import PrivateFiles


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
    """Lets programs start, such as those that download data, once rank 0 has prepared its data."""
    processes: Any = module
    original = processes.Popen.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        files.wait_for_rank_0()
        original(self, *args, **kwargs)

    processes.Popen.__init__ = __init__
