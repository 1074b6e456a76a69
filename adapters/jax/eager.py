"""Collectives outside jit: they call the core directly, with the arrays' own memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import Batch
from sirtaki.common import ops
from sirtaki.common.handles import Operation, spare_batch
from sirtaki.common.handles import run as run_operation
from sirtaki.common.ops import Call, Reduction
from sirtaki.common.tensor import ROW_MAJOR, TensorView
from sirtaki.jax.terms import Terms, dtype_code

_ALIGNMENT = 64  # bytes, so that JAX takes the memory over without a copy

Finish = Callable[[Context, Batch], Any]


def run(*arrays: Any, terms: Terms) -> list[Any]:
    """Returns this rank's results, as arrays. An all-to-all with splits adds the rows from each rank."""
    arrays = tuple(jax.numpy.asarray(array) for array in arrays)
    if any(
        _only_device(array, name).platform != "cpu" for array, name in zip(arrays, terms.names, strict=True)
    ):
        return _compiled(terms)(*arrays)
    context, batch = current(), spare_batch(len(arrays))
    parts = [_describe(context, batch, array, terms, index) for index, array in enumerate(arrays)]
    results = run_operation(
        context,
        Operation(batch, [keep for keep, _ in parts], lambda *ended: [finish(*ended) for _, finish in parts]),
    )
    return results[0] if terms.splits is not None else results


@lru_cache(maxsize=1024)
def _compiled(terms: Terms) -> Any:
    """Runs the collective as part of a program, which knows the streams of a GPU."""
    from sirtaki.jax.primitives import bind  # imported late: it imports this module

    return jax.jit(lambda *arrays: bind(terms, arrays))


def _only_device(array: Any, name: str) -> Any:
    devices = array.devices()
    if len(devices) > 1:
        raise UnsupportedError(
            f"'{name}' lies on {len(devices)} devices of this process, but a rank works on one: start a "
            "process for each device (hvdrun -np), and leave arrays whole"
        )
    return next(iter(devices))


def _describe(context: Context, batch: Batch, array: Any, terms: Terms, index: int) -> tuple[Any, Finish]:
    source = _view(array, terms.names[index])
    name = None if terms.name is None else terms.names[index]
    call = Call(name, terms.process_set)
    how = Reduction(terms.op, terms.prescale, terms.postscale)
    if terms.kind == core.ALLGATHER:
        ops.describe_allgather(batch, source, call, index)
        return source, partial(_gathered, array.dtype, index)
    if terms.kind == core.ALLTOALL:
        ops.describe_alltoall(batch, source, terms.splits, call, index)
        return source, partial(_exchanged if terms.splits is not None else _gathered, array.dtype, index)
    shape = array.shape
    if terms.kind == core.REDUCESCATTER and shape:
        shape = (_own_rows(context, shape[0], terms.process_set), *shape[1:])
    result = _empty(shape, array.dtype)
    if terms.kind == core.ALLREDUCE:
        ops.describe_allreduce(batch, source, result.ctypes.data, how, call, index)
    elif terms.kind == core.REDUCESCATTER:
        ops.describe_reducescatter(batch, source, result.ctypes.data, how, call, index)
    else:
        ops.describe_broadcast(batch, source, result.ctypes.data, terms.root, call, index)
    return (source, result), lambda *_: _to_jax(result)


def _own_rows(context: Context, rows: int, process_set: int) -> int:
    members = context.members(process_set)
    if context.rank not in members:
        return 0  # the core will report that this rank is not a member
    return rows // len(members) + (members.index(context.rank) < rows % len(members))


def _view(array: Any, name: str) -> TensorView:
    code = dtype_code(array.dtype, name)
    memory = np.asarray(array)  # waits for the array, and does not copy
    if not memory.flags.c_contiguous:
        memory = np.ascontiguousarray(memory)
    return TensorView(memory.ctypes.data, memory.shape, code, ROW_MAJOR, memory)


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _to_jax(memory: Any) -> Any:
    return jax.device_put(memory, may_alias=True)


def _gathered(dtype: Any, index: int, context: Context, batch: Batch) -> Any:
    output = context.output(batch, index)
    return _to_jax(np.frombuffer(output.buffer, np.uint8).view(dtype).reshape(output.shape))


def _exchanged(dtype: Any, index: int, context: Context, batch: Batch) -> list[Any]:
    received = np.array(context.received_splits(batch, index), np.int32)
    return [_gathered(dtype, index, context, batch), jax.numpy.asarray(received)]
