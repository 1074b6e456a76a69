"""The names that every adapter makes public: facts of the world, process sets, observations, reduce ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sirtaki.common import basics, observing
from sirtaki.common.basics import *  # noqa: F403
from sirtaki.common.observing import *  # noqa: F403
from sirtaki.common.ops import Adasum, Average, Max, Min, Product, Sum

__all__ = [*basics.__all__, *observing.__all__, "Adasum", "Average", "Max", "Min", "Product", "Sum"]


def lister(names: Sequence[str]) -> Callable[[], list[str]]:
    """Returns a module's `__dir__`: the public names only, for the completion of editors and notebooks."""
    return lambda: sorted(names)
