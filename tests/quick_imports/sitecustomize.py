"""Makes imports of frameworks quicker in the processes of the tests, on whose PYTHONPATH this folder is.

The objects of a framework are no garbage, but each full collection looks through all of them: a third of the
processor time of an import, and most of that of a process' end. No collection runs during the import of a
framework, and later ones leave its objects out. What a program makes afterwards is collected as always.

The import of torch's compiler is deferred. Any optimizer of torch imports `torch._dynamo`, for two functions
that do nothing outside of a compilation: half of the processor time of a short program. The module here has
these two, and imports the real one for everything else, so `torch.compile` works as always.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "transformers", "lightning", "ray")


class FrameworkFinder:
    """Finds the frameworks, and has them imported without collections."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in FRAMEWORKS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = without_collections(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def without_collections(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def execute_module(module: ModuleType) -> None:
        if not gc.isenabled():  # another framework is importing this one
            execute(module)
            return
        gc.disable()
        try:
            execute(module)
        finally:
            gc.enable()
            gc.freeze()

    return execute_module


class DeferredCompiler(ModuleType):
    """Stands for `torch._dynamo` until a program compiles."""

    def __getattr__(self, name: str) -> Any:
        # Whoever looks through all modules, as `inspect` does, asks each for `__file__` and the like.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(self._real(), name)

    @property
    def _is_deferred(self) -> bool:
        return sys.modules.get(NAME) is self

    def _real(self) -> Any:
        if self._is_deferred:
            del sys.modules[NAME]
        return importlib.import_module(NAME)

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Ends a graph that is being compiled."""
        if not self._is_deferred:
            self._real().graph_break(*args, **kwargs)

    def disable(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Returns a function that is not compiled."""
        if function is None:  # it is to return a decorator
            return self._real().disable(None, *args, **kwargs)
        disabled: list[Callable[..., Any]] = []

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            if self._is_deferred:
                return function(*call_args, **call_kwargs)
            if not disabled:
                disabled.append(self._real().disable(function, *args, **kwargs))
            return disabled[0](*call_args, **call_kwargs)

        return call


sys.modules.setdefault(NAME, DeferredCompiler(NAME))
sys.meta_path.insert(0, FrameworkFinder)
