"""Finds the program that a command names, and explains why there is none."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from sirtaki.runner.launch.errors import NOT_EXECUTABLE, NOT_FOUND, LaunchError

_PYTHON = ("python", "python3")
_HAS_SAFE_PATH = sys.version_info >= (3, 11)


def code_words(code: str, has_safe_path: bool = _HAS_SAFE_PATH) -> tuple[str, ...]:
    """Returns the words after Python's name that run code which imports no modules of the current folder.

    Anybody may have put a file with the name of one of Python's modules there. `has_safe_path`: whether this
    Python knows -P.
    """
    return ("-P", "-c", code) if has_safe_path else ("-c", f"import sys; del sys.path[0]; {code}")


def module_words(module: str, has_safe_path: bool = _HAS_SAFE_PATH) -> tuple[str, ...]:
    """Returns the words after Python's name that run a module of sirtaki, as `code_words`."""
    if has_safe_path:
        return "-P", "-m", module
    return code_words(f"import runpy; runpy.run_module('{module}', None, '__main__', True)", False)


def find_program(command: Sequence[str], size: int, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns the path of the program that `command` names, and a warning ("" for none).

    "python" means the Python of hvdrun's own environment, because that one has sirtaki. Raises LaunchError.
    """
    name = command[0]
    search = environment.get("PATH", os.defpath).split(os.pathsep)
    if name in _PYTHON:
        return _find_python(name, environment)
    found = name if "/" in name else _first_executable(name, search)
    if found is None or not os.path.exists(found):
        raise _not_found(command, size, search)
    if os.path.isdir(found) or not os.access(found, os.X_OK):
        raise _not_executable(command, size)
    return found, ""


def runs_python(command: Sequence[str]) -> bool:
    """Returns whether a command looks like a Python command."""
    is_python = os.path.basename(command[0]).startswith("python")
    return is_python or any(argument.endswith(".py") for argument in command)


def _find_python(name: str, environment: Mapping[str, str]) -> tuple[str, str]:
    own = _first_executable(name, [os.path.dirname(sys.executable)]) or sys.executable
    active = environment.get("VIRTUAL_ENV") or environment.get("CONDA_PREFIX")
    if not active:
        other = _first_executable(name, environment.get("PATH", os.defpath).split(os.pathsep))
        if other is None or _is_same_folder(os.path.dirname(other), os.path.dirname(own)):
            return own, ""
        return (
            own,
            f"'{name}' means {own}, where hvdrun is installed, and not {other}, which comes first on the "
            "PATH",
        )
    if _is_same_folder(os.path.join(active, "bin"), os.path.dirname(own)):
        return own, ""
    return own, (
        f"'{name}' means {own}, where hvdrun is installed, and not the environment {active}: "
        f"install sirtaki there, or write {os.path.join(active, 'bin', name)}, to use that one"
    )


def _is_same_folder(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _first_executable(name: str, search: Sequence[str]) -> str | None:
    return shutil.which(name, path=os.pathsep.join(folder or "." for folder in search))


def _not_found(command: Sequence[str], size: int, search: Sequence[str]) -> LaunchError:
    name = command[0]
    if os.path.exists(name) and "/" not in name:
        return _not_executable(command, size)
    if "/" in name:
        return LaunchError(f"there is no file '{name}'", NOT_FOUND)
    import difflib

    programs = {entry for folder in search if os.path.isdir(folder) for entry in os.listdir(folder)}
    alike = difflib.get_close_matches(name, [*_PYTHON, *sorted(programs)], n=1)
    hint = f" Did you mean '{alike[0]}'?" if alike else ""
    return LaunchError(f"there is no command '{name}' on the PATH.{hint}", NOT_FOUND)


def _not_executable(command: Sequence[str], size: int) -> LaunchError:
    name = command[0]
    if os.path.isdir(name):
        return LaunchError(f"'{name}' is a folder, not a program", NOT_EXECUTABLE)
    if name.endswith(".py"):
        better = f"hvdrun -np {size} python {shlex.join(command)}"
        text = f"'{name}' is a Python script, not a program: run `{better}`"
    elif "/" in name:
        text = f"'{name}' is not executable: run `chmod +x {shlex.quote(name)}`"
    else:
        text = f"'{name}' is not on the PATH: for the file in this folder write './{name}'"
    return LaunchError(text, NOT_EXECUTABLE)


# ---- A line on a terminal that shows what a program does at the moment ---------------------------------


@contextlib.contextmanager
def terminal_status(text: str) -> Iterator[Callable[[str], None]]:
    """Shows a text on standard error while the block runs, and yields a function that replaces it.

    "" hides it until the next text: while it is shown, other output would go to standard error, too. If
    standard error is no terminal, nothing is shown.
    """
    if not os.isatty(2):
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(text, spinner="line") as status:

        def show(text: str) -> None:
            if text:
                status.update(Text(text))  # it may be another host's
                status.start()
            else:
                status.stop()

        yield show
