"""Programs and libraries of the core with one changed source file, made from an existing build folder.

That folder stays unchanged: the commands of its build compile the files that depend on the changed one, and
link them with the other object files of the folder, into a folder of the mutant's own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from functools import cached_property
from pathlib import Path

from mutants import ROOT, TableError

_COMPILES = re.compile(r" -MD -MT \S+ -MF \S+ -o (?P<object>\S+) -c (?P<source>\S+)$")
_LINKS = re.compile(r" -o (?P<target>\S+) ")
_QUICK = "-O1"  # the compiler uses the last of several -O options
LIBRARY = "libsirtaki.so"
TENSORFLOW_LIBRARY = "libsirtaki_tensorflow.so"


class BuildError(Exception):
    """The build folder is not usable, or the mutant does not compile."""


def _run(command: str, folder: Path) -> str:
    ended = subprocess.run(command, cwd=folder, shell=True, capture_output=True, text=True)
    if ended.returncode:
        raise BuildError(f"{command}\n{ended.stdout}{ended.stderr}")
    return ended.stdout


class Build:
    """A build folder of the core, with its tests."""

    def __init__(self, folder: Path) -> None:
        """Raises BuildError if the folder is not built, or has no tests."""
        self.folder = folder.resolve()
        cache = self.folder / "CMakeCache.txt"
        found = re.search(r"^CMAKE_MAKE_PROGRAM\S*=(.*)$", cache.read_text() if cache.exists() else "", re.M)
        if found is None:
            raise BuildError(f"{folder} is no build folder of the core; make test builds one")
        self._ninja = shlex.quote(found[1])
        self._commands = _run(f"{self._ninja} -t commands", self.folder).splitlines()
        if not any(_LINKS.search(command) and "test_control" in command for command in self._commands):
            raise BuildError(f"{folder} has no tests; make test builds them")

    def refuse_stale(self) -> None:
        """Raises BuildError if a source is newer than the files that were built from it."""
        for one, files in self._depends.items():
            built = (self.folder / one).stat().st_mtime
            newer = [file for file in files if Path(file).stat().st_mtime > built]
            if newer:
                raise BuildError(f"{self.folder} is older than {newer[0]}: run make test, or build it")

    @cached_property
    def _compiles(self) -> dict[str, tuple[str, str]]:
        """Returns the source and the command of each object file."""
        found = {}
        for command in self._commands:
            if match := _COMPILES.search(command):
                found[match["object"]] = match["source"], command[: match.start()]
        return found

    @cached_property
    def _depends(self) -> dict[str, set[str]]:
        """Returns the files from which each object file was made, as absolute paths."""
        depends: dict[str, set[str]] = {}
        for line in _run(f"{self._ninja} -t deps", self.folder).splitlines():
            if line and not line.startswith(" "):
                files = depends.setdefault(line.partition(":")[0], set())
            elif line:
                files.add(os.path.normpath(self.folder / line.strip()))
        return depends

    def _link_command(self, target: str) -> str:
        for command in self._commands:
            if (match := _LINKS.search(command)) and match["target"] == target:
                return command
        raise BuildError(f"{self.folder} does not build {target}")

    def make(self, target: str, file: str, text: str, into: Path) -> Path:
        """Makes a program or library with `text` in place of source `file` (its path in the repository)."""
        original = str(ROOT / file)
        room = Path(file).parts[0]  # "core" or "bindings"
        overlay = into / room
        changed = overlay / Path(file).relative_to(room)
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_text(text)
        link = self._link_command(target)
        words = set(link.split())
        remade = {one for one, files in self._depends.items() if one in words and original in files}
        if not remade:
            raise TableError(f"{target} is not made of {file}")
        for number, one in enumerate(sorted(remade)):
            source, compile_command = self._compiles[one]
            if source == original:
                source = str(changed)
            elif f'"{original}"' in (unit := Path(source).read_text()):
                source = str(into / f"{number}.cc")
                Path(source).write_text(unit.replace(f'"{original}"', f'"{changed}"'))
            fresh = into / f"{number}.o"
            command = compile_command.replace(" -I", f" -I{shlex.quote(str(overlay))} -I", 1)
            _run(f"{command} {_QUICK} -o {shlex.quote(str(fresh))} -c {shlex.quote(source)}", self.folder)
            link = link.replace(f" {one} ", f" {shlex.quote(str(fresh))} ")
        made = into / target
        _run(link.replace(f" -o {target} ", f" -o {shlex.quote(str(made))} "), self.folder)
        return made

    def make_for_tensorflow(self, file: str, text: str, into: Path) -> Path:
        """Makes the library that TensorFlow loads: builds with tests have no rules for it."""
        sources = into / "tensorflow"
        sources.mkdir(parents=True, exist_ok=True)
        for source in (ROOT / "bindings" / "tensorflow").iterdir():
            (sources / source.name).write_text(text if source == ROOT / file else source.read_text())
        made = into / TENSORFLOW_LIBRARY
        bindings, core, place = (shlex.quote(str(path)) for path in (ROOT / "bindings", ROOT / "core", into))
        _run(
            f"c++ -std=c++20 -O1 -fPIC -shared -fvisibility=hidden -I{place} -I{bindings} -I{core}/include "
            f"{place}/tensorflow/*.cc -o {shlex.quote(str(made))} -L. -lsirtaki -ldl "
            f"-Wl,--version-script={bindings}/tensorflow/exports.map",
            self.folder,
        )
        return made
