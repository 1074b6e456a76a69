"""Data-parallel training with JAX, with Horovod's calls: `import sirtaki.jax as hvd`."""

from __future__ import annotations

from sirtaki.common.basics import *  # noqa: F403
from sirtaki.common.basics import __all__ as _basics
from sirtaki.common.objects import allgather_object, broadcast_object
from sirtaki.common.observing import *  # noqa: F403
from sirtaki.common.observing import __all__ as _observing
from sirtaki.common.ops import Adasum, Average, Max, Min, Product, Sum, join
from sirtaki.jax.collectives import *  # noqa: F403
from sirtaki.jax.collectives import __all__ as _collectives
from sirtaki.jax.compression import Compression
from sirtaki.jax.consistency import check_parameters
from sirtaki.jax.optimizer import DistributedOptimizer, grad, value_and_grad
from sirtaki.jax.parameters import broadcast_parameters, rank_key

__all__ = [
    *_basics,
    *_observing,
    *_collectives,
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "Compression",
    "DistributedOptimizer",
    "value_and_grad",
    "grad",
    "join",
    "broadcast_parameters",
    "check_parameters",
    "rank_key",
    "broadcast_object",
    "allgather_object",
]


def __dir__() -> list[str]:
    """Lists the public names only, for the completion of editors and notebooks."""
    return sorted(__all__)
