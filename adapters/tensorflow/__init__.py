"""Data-parallel training with TensorFlow, with Horovod's calls: `import sirtaki.tensorflow as hvd`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from sirtaki.common.public import *  # noqa: F403
from sirtaki.common.public import __all__ as _shared
from sirtaki.common.public import lister as _lister
from sirtaki.common.public import loader as _loader
from sirtaki.tensorflow.ops.collectives import *  # noqa: F403
from sirtaki.tensorflow.ops.collectives import __all__ as _collectives
from sirtaki.tensorflow.ops.compression import Compression
from sirtaki.tensorflow.ops.library import library as _library
from sirtaki.tensorflow.ops.topology_ops import *  # noqa: F403
from sirtaki.tensorflow.ops.topology_ops import __all__ as _topology_ops
from sirtaki.tensorflow.ops.topology_ops import (  # noqa: F401  # some are in `_shared`
    barrier,
    join,
    local_rank,
    local_size,
    rank,
    size,
)
from sirtaki.tensorflow.ops.xla import enable_xla
from sirtaki.tensorflow.training.consistency import check_parameters
from sirtaki.tensorflow.training.optimizer import DistributedOptimizer, GradientAccumulator
from sirtaki.tensorflow.training.state import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from sirtaki.tensorflow.training.tape import DistributedGradientTape, PartialDistributedGradientTape

if TYPE_CHECKING:
    from sirtaki.tensorflow import elastic
    from sirtaki.tensorflow.training.sync_batch_norm import SyncBatchNormalization

# Imported when a program first uses it: it needs Keras, which takes seconds to import.
_LATER = {"training.sync_batch_norm": ("SyncBatchNormalization",)}

_library()

if getattr(sys.modules.get("keras"), "__version__", "").startswith("3."):  # as after TensorFlow from 2.16 on
    import_module("sirtaki.tensorflow.training.sync_batch_norm")  # for layers of Keras that are synchronized


__all__ = [
    *_shared,
    *_topology_ops,
    *_collectives,
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "PartialDistributedGradientTape",
    "DistributedOptimizer",
    "GradientAccumulator",
    "SyncBatchNormalization",
    "barrier",
    "elastic",
    "enable_xla",
    "join",
    "broadcast_global_variables",
    "broadcast_variables",
    "check_parameters",
    "broadcast_object",
    "broadcast_object_fn",
    "allgather_object",
]

__dir__ = _lister(__all__)
__getattr__ = _loader(__name__, _LATER)
