"""The core as a peer: its C functions on requests that are described once, without an adapter in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from common.collectives import GROUP_SIZE, Array, Call
from common.peers import Peer
from sirtaki import __version__
from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.request import Batch
from sirtaki.common.ops import reduction as ops
from sirtaki.common.ops.reduction import Call as Named
from sirtaki.common.ops.reduction import Reduction, Sum, reduction
from sirtaki.common.ops.tensor import DTYPE_CODES, ROW_MAJOR, TensorView


class Core(Peer):
    """srt_run, srt_enqueue and srt_wait, called through cffi."""

    version = f"sirtaki {__version__}, C functions through cffi"

    def __init__(self, context: Context) -> None:
        super().__init__(context.rank, context.size)
        self._context = context
        self._sum: Reduction = reduction(Sum, None)

    def _call(self, describe: Callable[[Batch], Any], result: Any = None, count: int = 1) -> Call:
        batch, context = Batch(count), self._context
        describe(batch)

        def call() -> Any:
            context.run(batch)
            context.release(batch)
            return result

        return call

    def allreduce(self, array: Array) -> Call:
        view, name = _view(array), Named("core.allreduce")
        return self._call(
            lambda batch: ops.describe(batch, core.ALLREDUCE, view, view.pointer, name, how=self._sum), array
        )

    def grouped_allreduce(self, array: Array) -> Call:
        parts = np.array_split(array, GROUP_SIZE)

        def describe(batch: Batch) -> None:
            calls = ops.group_calls(self._context, "allreduce", "core", ops.global_process_set, GROUP_SIZE)
            for index, (part, call) in enumerate(zip(parts, calls, strict=True)):
                view = _view(part)
                ops.describe(batch, core.ALLREDUCE, view, view.pointer, call, index, how=self._sum)

        return self._call(describe, parts, GROUP_SIZE)

    def broadcast(self, array: Array) -> Call:
        view, name = _view(array), Named("core.broadcast")
        return self._call(lambda batch: ops.describe(batch, core.BROADCAST, view, view.pointer, name), array)

    def allgather(self, array: Array) -> Call:
        return self._allocated(core.ALLGATHER, array, "core.allgather")

    def reducescatter(self, array: Array) -> Call:
        part, name = np.empty(array.size // self.size, np.float32), Named("core.reducescatter")
        target, kind = _view(part).pointer, core.REDUCESCATTER
        return self._call(
            lambda batch: ops.describe(batch, kind, _view(array), target, name, how=self._sum), part
        )

    def alltoall(self, array: Array) -> Call:
        return self._allocated(core.ALLTOALL, array, "core.alltoall")

    def _allocated(self, kind: int, array: Array, name: str) -> Call:
        """Returns the call of a collective whose result the core allocates."""
        return self._call(lambda batch: ops.describe(batch, kind, _view(array), 0, Named(name)))

    def sendrecv(self, array: Array) -> Call:
        received = np.empty_like(array)

        def describe(batch: Batch) -> None:
            ranks = ((array, self.rank, self.next), (received, self.previous, self.rank))
            for index, (one, source, target) in enumerate(ranks):
                view, send = _view(one), Named("core.send")
                ops.describe(
                    batch, core.SEND, view, view.pointer, send, index, root=source, destination=target
                )

        return self._call(describe, received, 2)


def _view(array: Array) -> TensorView:
    return TensorView(array.ctypes.data, array.shape, DTYPE_CODES["float32"], ROW_MAJOR, array)
