"""A table in a world of its own, which the ranks of a job share with its servers (`hvdrun --servers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sirtaki.bindings.context import Context, using
from sirtaki.common.ops.objects import broadcast_object
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.tables import leave_table
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.broadcasting import broadcast_all
from sirtaki.torch.training.stale.table import Table, TableOptions


def shared_table(world: Context, parameters: Sequence[Tensor], options: TableOptions) -> Table:
    """Returns a rank's side of a table that the servers in this world serve. All ranks must call it.

    The servers use the optimizer's function of rank 0, which is pickled.

    Raises:
        Exception: the error that pickling raised, on rank 0.
        HorovodInternalError: rank 0 could not pickle its function, or a member was lost.
    """
    with using(world):
        broadcast_object((options, [(parameter.shape, parameter.dtype) for parameter in parameters]))
    _broadcast(world, [parameter.detach().contiguous() for parameter in parameters])
    return Table(_scope(world), parameters, options, partial(leave_table, world))


def serve(world: Context, on_end: Callable[[BaseException | None], None]) -> None:
    """Begins a server's side of a table."""
    with using(world):
        options, kinds = broadcast_object()
    values = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    _broadcast(world, values)
    Table(_scope(world), values, options, on_end)


def _broadcast(world: Context, values: Sequence[Tensor]) -> None:
    named = [(f"table.{place}", value) for place, value in enumerate(values)]
    broadcast_all(world, named, 0, global_process_set)


def _scope(world: Context) -> CollectiveScope:
    return CollectiveScope(world, "table", global_process_set)
