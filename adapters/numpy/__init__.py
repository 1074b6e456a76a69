"""Collective operations on numpy arrays, with Horovod's calls: `import sirtaki.numpy as hvd`."""

from __future__ import annotations

from sirtaki.common.basics import *  # noqa: F403
from sirtaki.common.basics import __all__ as _basics
from sirtaki.common.handles import Handle, poll, synchronize
from sirtaki.common.objects import allgather_object, broadcast_object
from sirtaki.common.observing import *  # noqa: F403
from sirtaki.common.observing import __all__ as _observing
from sirtaki.common.ops import Adasum, Average, Max, Min, Product, Sum, barrier, join
from sirtaki.numpy.movements import *  # noqa: F403
from sirtaki.numpy.movements import __all__ as _movements
from sirtaki.numpy.reductions import *  # noqa: F403
from sirtaki.numpy.reductions import __all__ as _reductions

__all__ = [
    *_basics,
    *_observing,
    *_reductions,
    *_movements,
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "Handle",
    "barrier",
    "join",
    "poll",
    "synchronize",
    "broadcast_object",
    "allgather_object",
]


def __dir__() -> list[str]:
    """Lists the public names only, for the completion of editors and notebooks."""
    return sorted(__all__)
