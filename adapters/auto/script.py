"""The user's script: found and run as Python itself does it."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, NoReturn

_OPENS_NOT = 2  # Python's exit code for a script that it cannot open


@dataclass
class Script:
    """A script or module that becomes `__main__`.

    Attributes:
        file: its absolute path.
        folder: the folder in which its own modules are.
        argument: its `sys.argv[0]`.
    """

    file: str
    folder: str
    argument: str
    arguments: list[str]
    code: CodeType
    loader: Any
    spec: ModuleSpec | None = None

    def run(self) -> None:
        """Runs it as `__main__`, permanently: for pickle, for spawned processes and for exit handlers."""
        module = ModuleType("__main__")
        module.__dict__.update(
            __file__=self.file,
            __loader__=self.loader,
            __spec__=self.spec,
            __package__=None if self.spec is None else self.spec.parent,
            __cached__=None if self.spec is None else self.spec.cached,
            __builtins__=builtins,
            __annotations__={},
        )
        if self.spec is None and not getattr(sys.flags, "safe_path", False):
            sys.path[0] = self.folder
        sys.modules["__main__"] = module
        sys.argv[:] = [self.argument, *self.arguments]
        exec(self.code, module.__dict__)


def find(arguments: Sequence[str]) -> Script:
    """Returns the script that a command line names. Raises SystemExit with Python's text if there is none."""
    if not arguments:
        _refuse("there is no script to run: hvdrun --auto -np 4 python train.py", 1)
    if arguments[0] == "-m":
        return _module(arguments[1], list(arguments[2:]))
    path = arguments[0]
    if os.path.isdir(path):
        _refuse(
            f"'{path}' is a folder: name the script in it, for example {os.path.join(path, '__main__.py')}", 1
        )
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        _refuse(
            f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}", _OPENS_NOT
        )
    path = os.path.abspath(path)
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        sys.exit(1)
    folder = os.path.dirname(os.path.realpath(path))
    return Script(path, folder, arguments[0], list(arguments[1:]), code, SourceFileLoader("__main__", path))


def _module(name: str, arguments: list[str]) -> Script:
    """Returns a module, or the module `__main__` of a package, as the script."""
    spec = _spec_of(name)
    if spec.submodule_search_locations is not None:
        spec = _spec_of(f"{name}.__main__")
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None or spec.origin is None:
        _refuse(f"No code object available for {name}", 1)
    return Script(spec.origin, os.getcwd(), spec.origin, arguments, code, loader, spec)


def _spec_of(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _refuse(f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})", 1)
    if spec is None:
        _refuse(f"No module named {name}", 1)
    return spec


def _refuse(text: str, exit_code: int) -> NoReturn:
    sys.stderr.write(f"{sys.executable}: {text}\n")
    sys.exit(exit_code)
