"""Data-parallel training with Horovod's calls.

Import the part for your library, for example `import sirtaki.torch as hvd`. This package itself imports none.
`sirtaki.run` calls a function on several ranks, from a notebook or a script.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sirtaki.bindings._version import VERSION as __version__

if TYPE_CHECKING:
    from sirtaki.runner.function.api import run
    from sirtaki.runner.function.errors import RemoteError, RunError

__all__ = ["RemoteError", "RunError", "__version__", "run"]
_HOMES = {
    "run": "sirtaki.runner.function.api",
    "RemoteError": "sirtaki.runner.function.errors",
    "RunError": "sirtaki.runner.function.errors",
}


def __getattr__(name: str) -> Any:
    """Imports `run` and its errors when they are used, because most programs do not."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
