"""The facts of the world. In an elastic job, programs traced with them are traced again when ranks change."""

from __future__ import annotations

import functools
from collections.abc import Callable

from sirtaki.common import basics
from sirtaki.jax.ops.programs import note_size
from sirtaki.numpy.worlds import is_elastic

__all__ = ["cross_rank", "cross_size", "local_rank", "local_size", "rank", "size"]


def _noted(fact: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(fact)
    def noted() -> int:
        if is_elastic():
            note_size()
        return fact()

    return noted


rank, size = _noted(basics.rank), _noted(basics.size)
local_rank, local_size = _noted(basics.local_rank), _noted(basics.local_size)
cross_rank, cross_size = _noted(basics.cross_rank), _noted(basics.cross_size)
