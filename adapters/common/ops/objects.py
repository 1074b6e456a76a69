"""Exchange of Python objects between ranks.

They are pickled, and only ever sent over links whose both ends have authenticated with the job's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context, current
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.bindings.library import ffi
from sirtaki.bindings.request import Batch
from sirtaki.common.ops.handles import Operation, pooled_batch, run
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Call, describe
from sirtaki.common.ops.tensor import DTYPE_CODES, ROW_MAJOR, TensorView

_BYTE = DTYPE_CODES["uint8"]
_UNPICKLABLE = (1 << 64) - 1  # sent instead of a size: the root has nothing to send


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends rank `root_rank`'s object to all ranks. All ranks of the set must call it.

    Only the root's `obj` is used.

    Args:
        obj: anything that cloudpickle can pickle.
        root_rank: the rank whose object is sent.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        The object itself on the root, a copy on the others.

    Raises:
        Exception: the error that pickling raised, on the root.
        HorovodInternalError: the root could not pickle its object, or a rank was lost.

    Example:
        import time
        name = hvd.broadcast_object(time.strftime("run-%Y%m%d-%H%M%S"))  # the text of rank 0, on all ranks
    """
    transport = ByteTransport(current(), name, process_set)
    if transport.context.rank == root_rank:
        _send(transport, obj, root_rank)
        return obj
    size = bytearray(8)
    transport.broadcast(size, root_rank, "size")
    count = int.from_bytes(size, "little")
    if count == _UNPICKLABLE:
        raise HorovodInternalError(
            f"rank {root_rank} could not pickle the object it was to broadcast: see its own error"
        )
    payload = bytearray(count)
    transport.broadcast(payload, root_rank, "payload")
    return _pickler().loads(payload)


def _send(transport: ByteTransport, obj: Any, root: int) -> None:
    try:
        payload = bytearray(_pickler().dumps(obj))
    except Exception:
        transport.broadcast(bytearray(_UNPICKLABLE.to_bytes(8, "little")), root, "size")
        raise
    transport.broadcast(bytearray(len(payload).to_bytes(8, "little")), root, "size")
    transport.broadcast(payload, root, "payload")


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collects an object of every rank of the set, all of which must call it.

    Args:
        obj: anything that cloudpickle can pickle.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        The objects in the order of ranks, the same on every rank (this rank's own is a copy too).

    Raises:
        Exception: the error that pickling raised, on that rank; the others wait for it.
        HorovodInternalError: a rank was lost.

    Example:
        counts = hvd.allgather_object({"rank": hvd.rank(), "samples": len(inputs)})
        samples = sum(count["samples"] for count in counts)  # of all ranks
    """
    return gather_objects(current(), obj, name, process_set)


def gather_objects(context: Context, obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """Works like `allgather_object`, for an explicit context. Ranks that have joined contribute no object."""
    transport = ByteTransport(context, name, process_set)
    payload = bytearray(_pickler().dumps(obj))
    sizes = transport.gather(bytearray(len(payload).to_bytes(8, "little")), "size")
    gathered = transport.gather(payload, "payload")
    objects, start = [], 0
    for index in range(len(sizes) // 8):
        end = start + int.from_bytes(sizes[8 * index : 8 * index + 8], "little")
        objects.append(_pickler().loads(gathered[start:end]))
        start = end
    return objects


class ByteTransport:
    """The transport of bytes between the ranks of a set, under names with a common prefix."""

    def __init__(self, context: Context, name: str | None, process_set: ProcessSet) -> None:
        self.context = context
        self._name = name
        self._process_set = process_set.number(context)

    def _call(self, part: str) -> Call:
        return Call(None if self._name is None else f"{self._name}.{part}", self._process_set)

    def broadcast(self, data: bytearray, root: int, part: str) -> None:
        """Overwrites the bytes with the root's; all ranks pass the same number of bytes."""
        batch, view = pooled_batch(), view_of_bytes(data)
        describe(batch, core.BROADCAST, view, view.pointer, self._call(part), root=root)
        run(self.context, Operation(batch, view, lambda *_: None))

    def gather(self, data: bytearray | memoryview, part: str) -> memoryview:
        """Returns all ranks' bytes, concatenated."""
        batch, view = pooled_batch(), view_of_bytes(data)
        describe(batch, core.ALLGATHER, view, 0, self._call(part))
        return run(self.context, Operation(batch, view, _output))

    def exchange(
        self, data: bytearray | memoryview, splits: Sequence[int], part: str
    ) -> tuple[memoryview, Sequence[int]]:
        """Sends consecutive bytes to each rank, `splits` of them. Returns what arrives, and its sizes."""
        batch, view = pooled_batch(), view_of_bytes(data)
        describe(batch, core.ALLTOALL, view, 0, self._call(part), splits=splits)

        def finish(context: Context, batch: Batch) -> tuple[memoryview, Sequence[int]]:
            sizes = context.received_splits(batch)  # first: the output clears the handle
            return _output(context, batch), sizes

        return run(self.context, Operation(batch, view, finish))


def _output(context: Context, batch: Batch) -> memoryview:
    """Returns a copy of what has arrived: the core's own memory would keep an ended world alive."""
    return memoryview(bytes(context.output(batch).buffer or b""))


def view_of_bytes(data: bytearray | memoryview) -> TensorView:
    """Returns a view of these bytes as a vector of uint8."""
    memory = ffi.from_buffer(data)
    return TensorView(int(ffi.cast("uintptr_t", memory)), (len(data),), _BYTE, ROW_MAJOR, memory)


def _pickler() -> Any:
    import cloudpickle  # imported late, because it takes longer to import than everything else together

    return cloudpickle
