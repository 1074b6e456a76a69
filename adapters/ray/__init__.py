"""Ranks as actors of Ray: `RayExecutor` with Horovod's calls, and `SirtakiConfig` for Ray Train."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sirtaki.runner.engines.versions import check_version

if TYPE_CHECKING:
    from sirtaki.ray.executor import RayExecutor
    from sirtaki.ray.train import SirtakiConfig

check_version("ray", "ray", tested="2.60.0")

__all__ = ["RayExecutor", "SirtakiConfig"]
_HOMES = {"RayExecutor": "sirtaki.ray.executor", "SirtakiConfig": "sirtaki.ray.train"}


def __getattr__(name: str) -> Any:
    """Imports what is used: Ray Train needs libraries that the executor does not need."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
