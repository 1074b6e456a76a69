"""Collective operations on numpy arrays, with Horovod's calls: `import sirtaki.numpy as hvd`."""

from __future__ import annotations

from sirtaki.common.basics import *  # noqa: F403
from sirtaki.common.basics import __all__ as _basics
from sirtaki.common.handles import Handle, poll, synchronize
from sirtaki.common.objects import allgather_object, broadcast_object
from sirtaki.common.observing import *  # noqa: F403
from sirtaki.common.observing import __all__ as _observing
from sirtaki.common.ops import Adasum, Average, Max, Min, Product, Sum, barrier, join
from sirtaki.numpy.movements import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    recv,
    recv_async,
    send,
    send_async,
)
from sirtaki.numpy.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)

__all__ = [
    *_basics,
    *_observing,
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "Handle",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "recv",
    "recv_async",
    "reducescatter",
    "reducescatter_async",
    "send",
    "send_async",
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
