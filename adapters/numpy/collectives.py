"""Collective operations on numpy arrays.

Every rank of the process set has to call the same operations with the same names. Calls without a name are
numbered per kind, so they match as long as all ranks make them in the same order. Wrong arguments raise
ValueError, and nothing is queued. Failures between ranks raise a HorovodInternalError: MismatchError if the
ranks disagree (the next operation works), PeerLostError if a rank died.

Each operation has a form that waits and one, `..._async`, that returns a handle at once:
`synchronize(handle)` returns the result of the waiting form. Until then, do not change its inputs, nor touch
its outputs. Names that end in an underscore work in place. A grouped operation completes all its tensors
together; the lists have the same length on all ranks.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from sirtaki.common.ops.collectives import ArrayCollectives, asynchronous
from sirtaki.numpy import arrays
from sirtaki.numpy.arrays import Array

__all__ = ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["reducescatter", "reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["send", "send_async", "recv", "recv_async"]

COLLECTIVES: ArrayCollectives[ArrayLike, Array, ArrayLike] = ArrayCollectives(arrays, __name__)

allreduce = COLLECTIVES.allreduce
allreduce_ = COLLECTIVES.allreduce_
allreduce_async = COLLECTIVES.allreduce_async
allreduce_async_ = asynchronous(allreduce_)
grouped_allreduce = COLLECTIVES.grouped_allreduce
grouped_allreduce_ = COLLECTIVES.grouped_allreduce_
grouped_allreduce_async = asynchronous(grouped_allreduce)
grouped_allreduce_async_ = asynchronous(grouped_allreduce_)
reducescatter = COLLECTIVES.reducescatter
reducescatter_async = asynchronous(reducescatter)
grouped_reducescatter = COLLECTIVES.grouped_reducescatter
grouped_reducescatter_async = asynchronous(grouped_reducescatter)
allgather = COLLECTIVES.allgather
allgather_async = asynchronous(allgather)
grouped_allgather = COLLECTIVES.grouped_allgather
grouped_allgather_async = asynchronous(grouped_allgather)
alltoall = COLLECTIVES.alltoall
alltoall_async = asynchronous(alltoall)
broadcast = COLLECTIVES.broadcast
broadcast_ = COLLECTIVES.broadcast_
broadcast_async = asynchronous(broadcast)
broadcast_async_ = asynchronous(broadcast_)
send = COLLECTIVES.send
send_async = COLLECTIVES.send_async
recv = COLLECTIVES.recv
recv_async = asynchronous(recv)
