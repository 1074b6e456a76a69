"""The end of the data, for ranks with unequal amounts."""

from __future__ import annotations

import torch
from torch import nn

from sirtaki.common import ops
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.torch.state import broadcast_optimizer_state, broadcast_parameters


def join(
    device: int = -1,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Signals that this rank has no more data, and waits until all ranks of the set have done so.

    Until then the rank takes part in the others' operations with neutral elements (zeros in sums, infinities
    in minima and maxima, ones in products, no rows in what is gathered), and can neither be the root of a
    broadcast, nor send or receive. Averages still divide by the number of all ranks, unless the setting
    join_average=contributors is on. All ranks of the set must call it in the end.

    Steps that the others still take do not change the parameters of a rank that has joined. With `model` and
    `optimizer`, all ranks get those of the rank that joined last. Without them, the ranks have diverged
    unless all had the same number of steps, and the optimizer's next step raises ParametersDifferError.

    Args:
        model: its parameters and buffers are made equal on all ranks afterwards. On all ranks, or none.
        optimizer: its state is made equal on all ranks afterwards. On all ranks, or none.
        device, process_set: as for `sirtaki.numpy.join`, as are the result and the errors.
    """
    last = ops.join(device, process_set=process_set)
    if model is not None:
        broadcast_parameters([*model.named_parameters(), *model.named_buffers()], last, process_set)
    if optimizer is not None:
        broadcast_optimizer_state(optimizer, last, process_set=process_set)
    return last
