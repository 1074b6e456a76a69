"""Collective operations on numpy arrays, with Horovod's calls: `import sirtaki.numpy as hvd`."""

from __future__ import annotations

from sirtaki.common.basics import *  # noqa: F403
from sirtaki.common.basics import __all__ as _basics
from sirtaki.common.handles import Handle, poll, synchronize
from sirtaki.common.objects import allgather_object, broadcast_object
from sirtaki.common.observing import *  # noqa: F403
from sirtaki.common.observing import __all__ as _observing
from sirtaki.common.ops import Average, Max, Min, Product, Sum
from sirtaki.numpy.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
)

__all__ = [
    *_basics,
    *_observing,
    "Average",
    "Sum",
    "Min",
    "Max",
    "Product",
    "Handle",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "allgather",
    "allgather_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "barrier",
    "poll",
    "synchronize",
    "broadcast_object",
    "allgather_object",
]
