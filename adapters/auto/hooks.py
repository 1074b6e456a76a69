"""Actions that follow the script's own import of a library, at once and before the script uses it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]


def install(hooks: Mapping[str, Sequence[Hook]]) -> None:
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
