"""Collective operations on numpy arrays, with Horovod's calls: `import sirtaki.numpy as hvd`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sirtaki.common.ops.handles import Handle, poll, synchronize
from sirtaki.common.ops.objects import allgather_object, broadcast_object
from sirtaki.common.ops.process_sets import join
from sirtaki.common.ops.requests import barrier
from sirtaki.common.public import *  # noqa: F403
from sirtaki.common.public import __all__ as _shared
from sirtaki.common.public import lister as _lister
from sirtaki.common.public import loader as _loader
from sirtaki.numpy.arrays import empty
from sirtaki.numpy.collectives import *  # noqa: F403
from sirtaki.numpy.collectives import __all__ as _collectives

if TYPE_CHECKING:
    from sirtaki.numpy import elastic

__all__ = [
    *_shared,
    *_collectives,
    "Handle",
    "elastic",
    "barrier",
    "empty",
    "join",
    "poll",
    "synchronize",
    "broadcast_object",
    "allgather_object",
]

__dir__ = _lister(__all__)
__getattr__ = _loader(__name__)
