"""Data-parallel training with JAX, with Horovod's calls: `import sirtaki.jax as hvd`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirtaki.common.ops.objects import allgather_object, broadcast_object
from sirtaki.common.ops.process_sets import join
from sirtaki.common.public import *  # noqa: F403
from sirtaki.common.public import __all__ as _shared
from sirtaki.common.public import lister as _lister
from sirtaki.common.public import loader as _loader
from sirtaki.jax import own_collectives, profiling  # the first of them imports JAX
from sirtaki.jax.ops.collectives import *  # noqa: F403
from sirtaki.jax.ops.collectives import __all__ as _collectives
from sirtaki.jax.ops.compression import Compression
from sirtaki.jax.ops.programs import *  # noqa: F403

if TYPE_CHECKING:
    from sirtaki.jax import elastic
    from sirtaki.jax.training.consistency import broadcast_parameters, check_parameters, rank_key
    from sirtaki.jax.training.one_batch import consistent, mirrored
    from sirtaki.jax.training.optimizer import DistributedOptimizer, grad, value_and_grad
    from sirtaki.jax.training.periodic import diloco, local_sgd
    from sirtaki.jax.training.sharding import divided_state, full_state, shard

# Imported when a program first uses them.
_LATER = {
    "training.consistency": ("broadcast_parameters", "check_parameters", "rank_key"),
    "training.one_batch": ("consistent", "mirrored"),
    "training.optimizer": ("DistributedOptimizer", "grad", "value_and_grad"),
    "training.periodic": ("diloco", "local_sgd"),
    "training.sharding": ("divided_state", "full_state", "shard"),
}

profiling.register()
enable_collectives = own_collectives.enable_collectives

__all__ = [
    *_shared,
    *_collectives,
    "Compression",
    "consistent",
    "DistributedOptimizer",
    "diloco",
    "divided_state",
    "elastic",
    "enable_collectives",
    "full_state",
    "local_sgd",
    "mirrored",
    "value_and_grad",
    "grad",
    "join",
    "broadcast_parameters",
    "check_parameters",
    "rank_key",
    "shard",
    "broadcast_object",
    "allgather_object",
]

__dir__ = _lister(__all__)
__getattr__ = _loader(__name__, _LATER)
