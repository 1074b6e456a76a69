"""Data-parallel training with torch, with Horovod's calls: `import sirtaki.torch as hvd`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirtaki.common.ops.handles import Handle, poll, synchronize
from sirtaki.common.ops.objects import allgather_object, broadcast_object
from sirtaki.common.ops.requests import barrier
from sirtaki.common.public import *  # noqa: F403
from sirtaki.common.public import __all__ as _shared
from sirtaki.common.public import lister as _lister
from sirtaki.common.public import loader as _loader
from sirtaki.torch import plain_optimizers, profiling
from sirtaki.torch.ops.collectives import *  # noqa: F403
from sirtaki.torch.ops.collectives import __all__ as _collectives
from sirtaki.torch.ops.compression import Compression

if TYPE_CHECKING:
    from sirtaki.torch import elastic
    from sirtaki.torch.consistency import check_parameters
    from sirtaki.torch.data import DataLoader, DistributedSampler
    from sirtaki.torch.gradient_memory import empty
    from sirtaki.torch.one_batch import consistent, mirrored
    from sirtaki.torch.ops.sparse import sparse_allreduce, sparse_allreduce_async
    from sirtaki.torch.state import broadcast_optimizer_state, broadcast_parameters, join
    from sirtaki.torch.sync_batch_norm import SyncBatchNorm
    from sirtaki.torch.training.optimizer import DistributedOptimizer
    from sirtaki.torch.training.out_of_memory import skip_if_out_of_memory
    from sirtaki.torch.training.periodic.optimizer import DiLoCo, LocalSGD
    from sirtaki.torch.training.sharded.clipping import clip_grad_norm_, clip_grad_value_
    from sirtaki.torch.training.sharded.optimizer import full_state_dict
    from sirtaki.torch.training.stale.server import ParameterServer

# Imported when a program first uses them: together they take longer than all of the rest.
_LATER = {
    "consistency": ("check_parameters",),
    "data": ("DataLoader", "DistributedSampler"),
    "one_batch": ("consistent", "mirrored"),
    "training.optimizer": ("DistributedOptimizer",),
    "training.out_of_memory": ("skip_if_out_of_memory",),
    "training.periodic.optimizer": ("DiLoCo", "LocalSGD"),
    "training.sharded.clipping": ("clip_grad_norm_", "clip_grad_value_"),
    "training.sharded.optimizer": ("full_state_dict",),
    "gradient_memory": ("empty",),
    "ops.sparse": ("sparse_allreduce", "sparse_allreduce_async"),
    "training.stale.server": ("ParameterServer",),
    "state": ("broadcast_optimizer_state", "broadcast_parameters", "join"),
    "sync_batch_norm": ("SyncBatchNorm",),
}

plain_optimizers.register_hook()
profiling.register()

__all__ = [
    *_shared,
    *_collectives,
    "Handle",
    "Compression",
    "DataLoader",
    "DistributedOptimizer",
    "DiLoCo",
    "DistributedSampler",
    "LocalSGD",
    "ParameterServer",
    "SyncBatchNorm",
    "clip_grad_norm_",
    "clip_grad_value_",
    "consistent",
    "elastic",
    "empty",
    "full_state_dict",
    "mirrored",
    "skip_if_out_of_memory",
    "sparse_allreduce",
    "sparse_allreduce_async",
    "barrier",
    "join",
    "poll",
    "synchronize",
    "broadcast_parameters",
    "broadcast_optimizer_state",
    "check_parameters",
    "broadcast_object",
    "allgather_object",
]

__dir__ = _lister(__all__)
__getattr__ = _loader(__name__, _LATER)
