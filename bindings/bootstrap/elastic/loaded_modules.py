"""The modules that a rank has loaded, and that a spare imports before it is needed."""

from __future__ import annotations

import contextlib
import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from types import ModuleType

from sirtaki.bindings.observing.ownership import is_private

SPARES = "SIRTAKI_SPARES"  # set for the workers of a job with spares: they write the list
_NAME = "modules"  # of the file, in the job's folder on each host
# Modules that do more than define names when they are imported (they open a GPU, or start MPI), and the
# user's program.
_EXCLUDED = ("mpi4py", "pycuda", "__main__")
_OWN = "sirtaki"


def list_path(folder: str) -> str:
    """Returns the path of the list of module names in the job's folder on a host."""
    return os.path.join(folder, _NAME)


def write_list(folder: str) -> None:
    """Writes the names of this process's modules, unless another rank of this host has done so.

    Ranks that do it at once write the same names. Nothing depends on the list: a file that cannot be written
    costs the job its spares on this host.
    """
    path = list_path(folder)
    if os.path.exists(path):
        return
    with contextlib.suppress(OSError):
        if is_private(os.lstat(folder)):  # it may be another user's, once a program has removed the job's
            _write(path, installed_modules(sys.modules))


def read_list(path: str) -> list[str]:
    """Returns the names, in the order in which a rank has loaded them. Raises OSError."""
    with open(path) as file:
        return file.read().split("\n")


def remove_from_list(path: str, name: str) -> None:
    """Removes a module from the list that later spares import. Raises OSError."""
    _write(path, [module for module in read_list(path) if module != name])


def installed_modules(modules: Mapping[str, ModuleType]) -> list[str]:
    """Returns the names of installed modules among these, in their order.

    Modules of the user's own program are left out: a spare must not run them before it has its place.
    """
    folders = _installation_folders()
    found = []
    for name, module in list(modules.items()):
        top = name.partition(".")[0]
        if top in _EXCLUDED or getattr(module, "__name__", None) != name or "\n" in name:
            continue
        if top == _OWN or top in sys.stdlib_module_names or _lies_in(module, folders):
            found.append(name)
    return found


def _write(path: str, names: Sequence[str]) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write("\n".join(names))
    os.replace(temporary, path)


def _installation_folders() -> tuple[str, ...]:
    """Returns the folders of the standard library and of installed packages, each with a slash."""
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in sorted(found) if folder)


def _lies_in(module: ModuleType, folders: Sequence[str]) -> bool:
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return isinstance(origin, str) and os.path.realpath(origin).startswith(tuple(folders))
