"""Imports the modules of the package `horovod`: each has the names of sirtaki's own modules."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sirtaki.as_horovod.table import MODULES, explain

_PREFIX = "horovod."


class Finder(MetaPathFinder):
    """Finds the modules of the table. The package itself is found on the path, as any other."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the specification of a module of Horovod, None for all other modules.

        Raises:
            ModuleNotFoundError: a module that sirtaki does not have; the text says what to do. The error has
                no `name`, so that Python shows it for `from horovod import spark` as well.
        """
        if fullname in MODULES and fullname.startswith(_PREFIX):
            return ModuleSpec(fullname, _Loader(), origin="sirtaki", is_package=True)
        if fullname.startswith(_PREFIX):
            raise ModuleNotFoundError(explain(fullname))
        return None


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        fill(module)


def fill(module: ModuleType) -> None:
    """Gives a module of Horovod the public names of sirtaki's modules, and its own modules."""
    name = module.__name__
    sources = [import_module(source) for source in MODULES[name]]

    def find(wanted: str) -> Any:
        whole = f"{name}.{wanted}"
        if whole in MODULES:
            return import_module(whole)
        is_public = not wanted.startswith("_") or wanted in names
        source = next((source for source in sources if is_public and hasattr(source, wanted)), None)
        if source is None:
            raise AttributeError(explain(whole))
        return getattr(source, wanted)

    names = [item for source in sources for item in _public(source)]
    module.__dict__.update(__getattr__=find, __dir__=lambda: sorted({*names, *_modules_of(name)}))
    module.__dict__["__all__"] = names


def _public(module: ModuleType) -> list[str]:
    own = [name for name in vars(module) if not name.startswith("_")]
    return list(getattr(module, "__all__", own))


def _modules_of(name: str) -> list[str]:
    return [module.rpartition(".")[2] for module in MODULES if module.rpartition(".")[0] == name]
