"""Memory of arrays that the ranks of a host share, for any library."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from sirtaki.bindings import shared_memory
from sirtaki.bindings.default_context import current
from sirtaki.bindings.errors import UnsupportedError


def memory_of(shape: int | Sequence[int], itemsize: int) -> tuple[tuple[int, ...], Any]:
    """Returns an array's extents, and zeroed memory for it; None instead of memory where ranks share none.

    Raises:
        OutOfMemoryError: there is not enough memory, or this rank's share of it is in use.
        NotInitializedError: init() has not been called.
    """
    extents = tuple(shape) if isinstance(shape, Sequence) else (operator.index(shape),)
    try:
        return extents, shared_memory.allocate(current(), math.prod(extents) * itemsize)
    except UnsupportedError:
        return extents, None
