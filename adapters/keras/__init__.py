"""Data-parallel training with Keras 3, with Horovod's calls: `import sirtaki.keras as hvd`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras as _keras


def _check() -> None:
    """Raises ImportError unless this is Keras 3."""
    version = getattr(_keras, "__version__", "of unknown version")
    if not version.startswith("3."):
        raise ImportError(
            f"sirtaki.keras serves Keras 3, and this is Keras {version}: pip install 'keras>=3.10'. Models "
            "of Keras 2 (tf_keras, TF_USE_LEGACY_KERAS) cannot be trained with it"
        )


_check()

from sirtaki.common.ops.objects import allgather_object, broadcast_object  # noqa: E402
from sirtaki.common.ops.process_sets import join  # noqa: E402
from sirtaki.common.ops.requests import barrier  # noqa: E402
from sirtaki.common.public import *  # noqa: E402, F403
from sirtaki.common.public import __all__ as _shared  # noqa: E402
from sirtaki.common.public import lister as _lister  # noqa: E402
from sirtaki.common.public import loader as _loader  # noqa: E402
from sirtaki.keras import callbacks  # noqa: E402
from sirtaki.keras.broadcasting import broadcast_model, broadcast_variables, load_model  # noqa: E402
from sirtaki.keras.compression import Compression  # noqa: E402
from sirtaki.keras.data.sharding import shard, shard_arrays  # noqa: E402
from sirtaki.keras.metrics import reduce_metrics, verbose  # noqa: E402
from sirtaki.keras.operations import *  # noqa: E402, F403
from sirtaki.keras.operations import __all__ as _operations  # noqa: E402
from sirtaki.keras.training.consistency import check_parameters  # noqa: E402
from sirtaki.keras.training.optimizer import DistributedOptimizer, PartialDistributedOptimizer  # noqa: E402
from sirtaki.keras.training.sharded.optimizer import full_state_dict, save_model  # noqa: E402

if TYPE_CHECKING:
    from sirtaki.keras import elastic

__all__ = [
    *_shared,
    *_operations,
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "callbacks",
    "elastic",
    "barrier",
    "join",
    "broadcast_variables",
    "broadcast_model",
    "check_parameters",
    "broadcast_object",
    "allgather_object",
    "full_state_dict",
    "load_model",
    "reduce_metrics",
    "save_model",
    "shard",
    "shard_arrays",
    "verbose",
]

__dir__ = _lister(__all__)
__getattr__ = _loader(__name__)
