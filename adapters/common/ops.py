"""Collective operations on views of memory. Adapters turn their tensors into views, and results back."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from sirtaki._core import request as core
from sirtaki._core.context import Context
from sirtaki._core.request import Batch
from sirtaki.common.handles import Operation, run, spare_batch
from sirtaki.common.tensor import DTYPE_CODES, TensorView

# Horovod's numbers. 2, its Adasum, is not an operation here.
Average, Sum, Min, Max, Product = 0, 1, 3, 4, 5

_REDUCE_OPS = {Average: core.AVERAGE, Sum: core.SUM, Min: core.MIN, Max: core.MAX, Product: core.PRODUCT}


class Reduction(NamedTuple):
    """How an all-reduce combines: the core's operation, and factors applied before and after it."""

    op: int = core.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0


def reduction(
    op: int | None, average: bool | None, prescale: float = 1.0, postscale: float = 1.0
) -> Reduction:
    """The reduction that Horovod's arguments mean: `op`, or the older `average`; Average without either.

    Raises:
        ValueError: both are given, or there is no such operation.
    """
    if average is not None:
        if op is not None:
            raise ValueError(
                "give either op or average, not both; average is the older way to say op=Average or op=Sum"
            )
        warnings.warn("average is deprecated: say op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    code = core.AVERAGE if op is None else _REDUCE_OPS.get(op)
    if code is None:
        raise ValueError(f"op is {op!r}, but it has to be one of Average, Sum, Min, Max and Product")
    return Reduction(code, prescale, postscale)


def describe_allreduce(
    batch: Batch,
    source: TensorView,
    target: int,
    how: Reduction,
    name: str | None,
    index: int = 0,
    group: tuple[int, int] = (0, 0),
) -> None:
    """Makes request `index` an all-reduce of `source` into address `target`, which may be the source's."""
    batch.describe(
        index,
        core.ALLREDUCE,
        source.dtype,
        source.shape,
        name=name,
        reduce_op=how.op,
        layout=source.layout,
        prescale=how.prescale,
        postscale=how.postscale,
        group=group,
    )
    batch.point(index, source.pointer, target)


def describe_broadcast(
    batch: Batch, source: TensorView, target: int, root: int, name: str | None, index: int = 0
) -> None:
    """Makes request `index` a broadcast of rank `root`'s source into the address `target` on every rank."""
    batch.describe(
        index, core.BROADCAST, source.dtype, source.shape, name=name, root=root, layout=source.layout
    )
    batch.point(index, source.pointer, target)


def describe_allgather(batch: Batch, source: TensorView, name: str | None, index: int = 0) -> None:
    """Makes request `index` a concatenation along dimension 0, into memory that the core allocates.

    The source has to be row-major and of one dimension at least; take the result with `Context.output`.
    """
    batch.describe(index, core.ALLGATHER, source.dtype, source.shape, name=name, layout=source.layout)
    batch.point(index, source.pointer, 0)


def barrier(context: Context, name: str | None = None) -> None:
    """Returns once every rank has called it."""
    batch = spare_batch()
    batch.describe(0, core.BARRIER, DTYPE_CODES["uint8"], (0,), name=name)
    batch.point(0, 0, 0)
    run(context, Operation(batch, None, lambda *_: None))
