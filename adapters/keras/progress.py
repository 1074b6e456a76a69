"""One progress bar, not one a rank."""

from __future__ import annotations

from typing import Any

from sirtaki._core.current import current


def verbose(level: Any = "auto") -> Any:
    """What to pass to `fit` and `evaluate` as `verbose`: `level` on rank 0, 0 on the others.

    Raises:
        NotInitializedError: init() has not been called.
    """
    return level if current().rank == 0 else 0
