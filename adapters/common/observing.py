"""What a rank does, made visible: statistics, alike for every framework."""

from __future__ import annotations

from sirtaki._core import observe
from sirtaki._core.current import current
from sirtaki._core.observe import Lateness, Statistics

__all__ = ["Lateness", "Statistics", "stats"]


def stats() -> Statistics:
    """What this rank has done since init(), and who comes late: see `Statistics` for each field and its unit.

    Cheap, and only this rank's own business: other ranks need not call it.

    Raises:
        NotInitializedError: before init() or after shutdown() (a ValueError).
    """
    return observe.statistics(current())
