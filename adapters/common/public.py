"""The names that every adapter makes public: facts of the world, process sets, observations, reduce ops."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from sirtaki.common import basics
from sirtaki.common.basics import *  # noqa: F403
from sirtaki.common.ops.requests import Adasum, Average, Max, Min, Product, Sum

__all__ = [*basics.__all__, "Adasum", "Average", "Max", "Min", "Product", "Sum"]


def lister(names: Sequence[str]) -> Callable[[], list[str]]:
    """Returns a module's `__dir__`: the public names only, for the completion of editors and notebooks."""
    return lambda: sorted(names)


def loader(package: str, homes: Mapping[str, Sequence[str]] | None = None) -> Callable[[str], Any]:
    """Returns a package's `__getattr__`, which imports its rarely used parts when a program first uses them.

    Importing all of an adapter takes several times as long as importing what most programs use. The package
    imports the same names under TYPE_CHECKING, so that type checkers know them.

    Args:
        package: its name. Its part `elastic` is always imported on first use.
        homes: the public names that are imported on first use, by the module of the package that has them.
    """
    home_of = {name: f"{package}.{home}" for home, names in (homes or {}).items() for name in names}

    def load(name: str) -> Any:
        if name == "elastic":
            return import_module(f"{package}.elastic")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)  # later uses find it there
        return value

    return load
