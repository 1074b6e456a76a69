"""The names that every adapter makes public: facts of the world, process sets, observations, reduce ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from sirtaki.common import basics, observing
from sirtaki.common.basics import *  # noqa: F403
from sirtaki.common.observing import *  # noqa: F403
from sirtaki.common.ops import Adasum, Average, Max, Min, Product, Sum

__all__ = [*basics.__all__, *observing.__all__, "Adasum", "Average", "Max", "Min", "Product", "Sum"]


def lister(names: Sequence[str]) -> Callable[[], list[str]]:
    """Returns a module's `__dir__`: the public names only, for the completion of editors and notebooks."""
    return lambda: sorted(names)


def loader(package: str) -> Callable[[str], ModuleType]:
    """Returns a package's `__getattr__`, which imports its part `elastic` when a program first uses it."""

    def load(name: str) -> ModuleType:
        if name != "elastic":
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.elastic")

    return load
