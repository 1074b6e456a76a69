"""The sources of a script: its file, and the modules in its folder that it imports."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from sirtaki.auto.script import Script

_DISTRIBUTED = ("horovod", "sirtaki")
_MAX_FILES = 500  # that are read before the script begins
# Sources of randomness that no seed governs: the attributes of modules, or their names after an import.
_UNEQUAL = {
    "random.SystemRandom": "random numbers of the system",
    "os.urandom": "random numbers of the system",
    "numpy.random.RandomState": "a generator with a seed of its own, unless you give it one",
}
_UNEQUAL_MODULES = {"secrets": "random numbers of the system", "uuid": "numbers of clocks and of the system"}
_SEEDING = ("seed", "manual_seed", "set_random_seed", "set_seed", "default_rng", "RandomState", "Random")
_CLOCKS = ("time.time", "time.time_ns", "time.perf_counter", "time.monotonic", "datetime.datetime.now")


class ScriptFile:
    """One file of the script's."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        self._nodes = list(ast.walk(tree))
        self._names = dict(self._imported_names())

    def imports(self) -> Iterator[tuple[str, int]]:
        """Yields modules that are imported by absolute names, and perhaps their attributes, with lines."""
        for node in self._nodes:
            if isinstance(node, ast.Import):
                yield from ((one.name, node.lineno) for one in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module, node.lineno
                yield from ((f"{node.module}.{one.name}", node.lineno) for one in node.names)

    def relative_imports(self) -> Iterator[tuple[int, str]]:
        """Yields the levels and the names of modules that are imported relative to this one."""
        for node in self._nodes:
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [f"{node.module}.{one.name}" if node.module else one.name for one in node.names]
                yield from ((node.level, name) for name in [*filter(None, [node.module]), *names])

    def unequal(self) -> Iterator[tuple[int, str]]:
        """Yields lines whose random numbers would differ between ranks, and why."""
        for node in self._nodes:
            if not isinstance(node, ast.Call):
                continue
            name = self._full_name(node.func)
            module = name.partition(".")[0]
            if module in _UNEQUAL_MODULES and name != module:
                yield node.lineno, f"{name}(): {_UNEQUAL_MODULES[module]}"
            elif name in _UNEQUAL and (not name.endswith("RandomState") or _has_no_seed(node)):
                yield node.lineno, f"{name}(): {_UNEQUAL[name]}"
            elif name.rpartition(".")[2] in _SEEDING:
                inner = (one for argument in node.args for one in ast.walk(argument))
                clocks = [self._full_name(one.func) for one in inner if isinstance(one, ast.Call)]
                if any(clock in _CLOCKS for clock in clocks):
                    yield node.lineno, f"{name}(): a seed of the clock"

    def _imported_names(self) -> Iterator[tuple[str, str]]:
        for node in self._nodes:
            if isinstance(node, ast.Import):
                for one in node.names:
                    yield (
                        one.asname or one.name.partition(".")[0],
                        one.name if one.asname else one.name.partition(".")[0],
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for one in node.names:
                    yield one.asname or one.name, f"{node.module}.{one.name}"

    def _full_name(self, node: ast.expr) -> str:
        """Returns the name of a function with its module, such as "numpy.random.seed"; "" for others."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self._full_name(node.value)):
            return f"{owner}.{node.attr}"
        return ""


def sources_of(script: Script) -> Iterator[ScriptFile]:
    """Yields the script's file and the modules in its folder that these files import."""
    pending, seen = [script.file], {script.file}
    while pending and len(seen) <= _MAX_FILES:
        path = pending.pop(0)
        try:
            source = ScriptFile(path, ast.parse(Path(path).read_bytes(), path))
        except (OSError, SyntaxError, ValueError):
            continue  # Python reports it when it comes to it
        yield source
        found = [(script.folder, name) for name, _ in source.imports()]
        found += [(_parent(path, level), name) for level, name in source.relative_imports()]
        for folder, name in found:
            base = os.path.join(folder, *name.split("."))
            for file in (f"{base}.py", os.path.join(base, "__init__.py")):
                if file not in seen and os.path.isfile(file):
                    seen.add(file)
                    pending.append(file)


def why_not_auto(source: ScriptFile) -> str | None:
    """Returns why a source is no part of a script for one process; None: it may be."""
    for name, line in source.imports():
        package = name.partition(".")[0]
        if package in _DISTRIBUTED:
            return (
                f"{source.path}:{line}: this script is distributed already, because it imports {package}: "
                "run it without --auto"
            )
    return None


def _parent(path: str, level: int) -> str:
    for _ in range(level):
        path = os.path.dirname(path)
    return path


def _has_no_seed(call: ast.Call) -> bool:
    return not call.args and not call.keywords
