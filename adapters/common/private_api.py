"""Access to what a framework does not document: found when an adapter is imported, or refused by its name.

Each adapter lists its symbols in its `_private.py`; nothing else in it names one.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple


class Framework(NamedTuple):
    """A framework with private symbols that sirtaki uses.

    Attributes:
        name: its package, such as "torch".
        version: the version that is installed.
        tested: the versions that its symbols have been tested with.
    """

    name: str
    version: str
    tested: str

    def symbol(self, path: str) -> Any:
        """Returns a symbol by its path, such as "torch._C._current_graph_task_id".

        Raises ImportError, with the path and the tested versions, if this version does not have it.
        """
        found = self.optional(path)
        if found is None:
            raise self._missing(path)
        return found

    def optional(self, path: str) -> Any:
        """Works like `symbol`, but returns None for a symbol that only some builds or versions have."""
        module, *rest = path.split(".")
        found: Any = importlib.import_module(module)
        for name in rest:
            module = f"{module}.{name}"
            found = getattr(found, name, None) or _module(module)
            if found is None:
                return None
        return found

    def attribute(self, owner: Any, name: str) -> Any:
        """Returns a private attribute of an object. Raises ImportError, as `symbol` does, if it has none."""
        try:
            return getattr(owner, name)
        except AttributeError:
            raise self._missing(f"{type(owner).__name__}.{name}") from None

    def _missing(self, path: str) -> ImportError:
        return ImportError(
            f"sirtaki uses {path}, which {self.name} {self.version} does not have; it has been tested with "
            f"{self.name} {self.tested}: install one of these, or a newer sirtaki"
        )


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        return None
