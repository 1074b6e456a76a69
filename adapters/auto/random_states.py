"""Random states that are equal on all ranks, as if there were a single process.

Every rank runs the whole script, so all ranks have to make the same random choices: initial weights, orders
of data, augmentations. The generators of Python, NumPy and the frameworks therefore start with a common seed
from rank 0, and a seed that the script sets is the script's own, equal everywhere.
"""

from __future__ import annotations

import ast
import os
import random
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sirtaki.auto.script import Script
from sirtaki.bindings.observing.user_code import is_internal

SEED_BYTES = 16
_NUMPY_LIMIT = 2**32  # of seeds for numpy.random.seed, exclusive
_TORCH_LIMIT = 2**63


@dataclass
class _Shared:
    """The seed of rank 0, and how many generators have been derived from it."""

    seed: int = 0
    generators: int = 0


_shared = _Shared()


def new_seed() -> bytes:
    """Returns fresh bytes for a seed, rank 0's for all ranks."""
    return secrets.token_bytes(SEED_BYTES)


def share(seed: bytes) -> None:
    """Seeds Python's generator; libraries' generators are seeded when the script has imported them."""
    _shared.seed = int.from_bytes(seed, "little")
    random.seed(_shared.seed)


def seed_numpy(module: ModuleType) -> None:
    """Seeds `numpy.random`, and makes generators without a seed of their own equal on all ranks."""
    generators: Any = module
    generators.seed(_shared.seed % _NUMPY_LIMIT)
    original: Callable[..., Any] = generators.default_rng

    def default_rng(seed: Any = None) -> Any:
        if seed is None and not is_internal(sys._getframe(1).f_code.co_filename):
            _shared.generators += 1
            seed = [*_shared.seed.to_bytes(SEED_BYTES, "little"), _shared.generators]
        return original(seed)

    default_rng.__doc__, default_rng.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
    generators.default_rng = default_rng


def seed_torch(module: ModuleType) -> None:
    """Seeds torch's generators of all devices."""
    torch: Any = module
    torch.manual_seed(_shared.seed % _TORCH_LIMIT)


def seed_tensorflow(module: ModuleType) -> None:
    """Sets TensorFlow's global seed."""
    tensorflow: Any = module
    tensorflow.random.set_seed(_shared.seed % _NUMPY_LIMIT)


# ---- The sources of a script: its file, and the modules in its folder that it imports ------------------


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
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module, node.lineno
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)

    def relative_imports(self) -> Iterator[tuple[int, str]]:
        """Yields the levels and the names of modules that are imported relative to this module."""
        for node in self._nodes:
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
                yield from ((node.level, name) for name in [*filter(None, [node.module]), *names])

    def unequal(self) -> Iterator[tuple[int, str]]:
        """Yields lines with random numbers that would differ between ranks, and why."""
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
                inner = (part for argument in node.args for part in ast.walk(argument))
                clocks = [self._full_name(call.func) for call in inner if isinstance(call, ast.Call)]
                if any(clock in _CLOCKS for clock in clocks):
                    yield node.lineno, f"{name}(): a seed of the clock"

    def _imported_names(self) -> Iterator[tuple[str, str]]:
        for node in self._nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield (
                        alias.asname or alias.name.partition(".")[0],
                        alias.name if alias.asname else alias.name.partition(".")[0],
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"

    def _full_name(self, node: ast.expr) -> str:
        """Returns the dotted name of an expression, such as "numpy.random.seed"; "" if it has none."""
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
    """Returns why a source is no part of a single-process script; None: it may be."""
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
