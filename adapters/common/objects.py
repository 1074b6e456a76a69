"""Python objects between ranks.

They are pickled, and only ever sent over links whose both ends have proved the job's key.
"""

from __future__ import annotations

from typing import Any

import cloudpickle

from sirtaki._core.context import Context
from sirtaki._core.current import current
from sirtaki._core.errors import HorovodInternalError
from sirtaki._core.library import ffi
from sirtaki.common import ops
from sirtaki.common.handles import Operation, run, spare_batch
from sirtaki.common.tensor import DTYPE_CODES, ROW_MAJOR, TensorView

_BYTE = DTYPE_CODES["uint8"]
_UNPICKLABLE = (1 << 64) - 1  # instead of a size: the root has nothing to send


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Sends rank `root_rank`'s object to all ranks. All ranks must call it; only the root's `obj` counts.

    Args:
        obj: anything that cloudpickle can pickle.
        root_rank: whose object is sent.
        name: how the ranks recognise the operation.

    Returns:
        The object itself on the root, a copy on the others.

    Raises:
        Exception: what pickling raised, on the root.
        HorovodInternalError: the root could not pickle its object, or a rank was lost.
    """
    context = current()
    if context.rank == root_rank:
        _send(context, obj, root_rank, name)
        return obj
    size = bytearray(8)
    _broadcast_bytes(context, size, root_rank, name, "size")
    count = int.from_bytes(size, "little")
    if count == _UNPICKLABLE:
        raise HorovodInternalError(
            f"rank {root_rank} could not pickle the object it was to broadcast: see its own error"
        )
    payload = bytearray(count)
    _broadcast_bytes(context, payload, root_rank, name, "payload")
    return cloudpickle.loads(payload)


def _send(context: Context, obj: Any, root: int, name: str | None) -> None:
    try:
        payload = bytearray(cloudpickle.dumps(obj))
    except Exception:
        _broadcast_bytes(context, bytearray(_UNPICKLABLE.to_bytes(8, "little")), root, name, "size")
        raise
    _broadcast_bytes(context, bytearray(len(payload).to_bytes(8, "little")), root, name, "size")
    _broadcast_bytes(context, payload, root, name, "payload")


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Collects an object of every rank. All ranks must call it.

    Args:
        obj: anything that cloudpickle can pickle.
        name: how the ranks recognise the operation.

    Returns:
        The objects in the order of ranks, the same on every rank (this rank's own is a copy too).

    Raises:
        Exception: what pickling raised, on that rank; the others wait for it.
        HorovodInternalError: a rank was lost.
    """
    context = current()
    payload = bytearray(cloudpickle.dumps(obj))
    sizes = _gather_bytes(context, bytearray(len(payload).to_bytes(8, "little")), _named(name, "size"))
    gathered = memoryview(_gather_bytes(context, payload, _named(name, "payload")))
    objects, start = [], 0
    for rank in range(context.size):
        end = start + int.from_bytes(sizes[8 * rank : 8 * rank + 8], "little")
        objects.append(cloudpickle.loads(gathered[start:end]))
        start = end
    return objects


def _named(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _view(data: bytearray) -> TensorView:
    memory = ffi.from_buffer(data)
    return TensorView(int(ffi.cast("uintptr_t", memory)), (len(data),), _BYTE, ROW_MAJOR, memory)


def _broadcast_bytes(context: Context, data: bytearray, root: int, name: str | None, part: str) -> None:
    """Overwrites the bytes with the root's; all ranks give as many."""
    batch, view = spare_batch(), _view(data)
    ops.describe_broadcast(batch, view, view.pointer, root, _named(name, part))
    run(context, Operation(batch, view, lambda *_: None))


def _gather_bytes(context: Context, data: bytearray, name: str | None) -> bytes:
    batch, view = spare_batch(), _view(data)
    ops.describe_allgather(batch, view, name)
    return run(context, Operation(batch, view, lambda context, batch: bytes(context.output(batch).buffer)))
