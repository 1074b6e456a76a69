"""A single progress bar, instead of one per rank."""

from __future__ import annotations

from typing import Any

from sirtaki.bindings.default_context import current


def verbose(level: Any = "auto") -> Any:
    """Returns the `verbose` argument for `fit` and `evaluate`: `level` on rank 0, 0 on the others.

    Raises:
        NotInitializedError: init() has not been called.
    """
    return level if current().rank == 0 else 0
