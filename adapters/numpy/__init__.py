"""Collective operations on numpy arrays, with Horovod's calls: `import sirtaki.numpy as hvd`."""

from __future__ import annotations

from sirtaki.common.handles import Handle, poll, synchronize
from sirtaki.common.objects import allgather_object, broadcast_object
from sirtaki.common.ops import barrier, join
from sirtaki.common.public import *  # noqa: F403
from sirtaki.common.public import __all__ as _shared
from sirtaki.common.public import lister as _lister
from sirtaki.numpy.collectives import *  # noqa: F403
from sirtaki.numpy.collectives import __all__ as _collectives

__all__ = [
    *_shared,
    *_collectives,
    "Handle",
    "barrier",
    "join",
    "poll",
    "synchronize",
    "broadcast_object",
    "allgather_object",
]

__dir__ = _lister(__all__)
