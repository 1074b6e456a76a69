"""Defers the import of torch's compiler in the processes of the tests, on whose PYTHONPATH this folder is.

Any optimizer of torch imports `torch._dynamo`, for two functions that do nothing outside of a compilation:
half of the processor time of a short program. The module here has these two, and imports the real one for
everything else, so `torch.compile` works as always.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


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
