"""Data-parallel training with torch, with Horovod's calls: `import sirtaki.torch as hvd`."""

from __future__ import annotations

from sirtaki.common.basics import *  # noqa: F403
from sirtaki.common.basics import __all__ as _basics
from sirtaki.common.handles import Handle, poll, synchronize
from sirtaki.common.objects import allgather_object, broadcast_object
from sirtaki.common.observing import *  # noqa: F403
from sirtaki.common.observing import __all__ as _observing
from sirtaki.common.ops import Average, Max, Min, Product, Sum
from sirtaki.torch import elastic
from sirtaki.torch.compression import Compression
from sirtaki.torch.ops import (
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
from sirtaki.torch.optimizer import DistributedOptimizer
from sirtaki.torch.state import broadcast_optimizer_state, broadcast_parameters
from sirtaki.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    *_basics,
    *_observing,
    "Average",
    "Sum",
    "Min",
    "Max",
    "Product",
    "Handle",
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "elastic",
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
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "broadcast_object",
    "allgather_object",
]
