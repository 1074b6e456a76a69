"""The end of the data, for ranks with unequal amounts."""

from __future__ import annotations

import torch
from torch import nn

from sirtaki.common.ops import joining
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.torch.state import broadcast_optimizer_state, broadcast_parameters


def join(
    device: int = -1,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Signals that this rank has no more data, and waits until all ranks of the set have done so.

    Until then the rank takes part in the others' operations with neutral elements: zeros in sums, infinities
    in minima and maxima, ones in products, no rows in what is gathered. It cannot be the root of a broadcast,
    nor send or receive. An average still divides by the number of all ranks, or, with the setting
    join_average=contributors, by those that have not joined. All ranks of the set must call it in the end.

    Steps that the others still take do not change the parameters of a rank that has joined. With `model` and
    `optimizer`, all ranks get those of the rank that joined last. Without them, the ranks have diverged
    unless all had the same number of steps, and the optimizer's next step raises ParametersDifferError.

    Args:
        device: the GPU on which this rank takes part, if the others' tensors are on GPUs; -1: the one that
            its own tensors have been on.
        model: its parameters and buffers are made equal on all ranks afterwards. On all ranks, or none.
        optimizer: its state is made equal on all ranks afterwards. On all ranks, or none.
        process_set: the set in which this rank has no more data.

    Returns:
        The rank that joined last, the same on all ranks.

    Raises:
        ValueError: this rank does not belong to the set, or has joined it already.
        PeerLostError: a rank died.
    """
    last = joining.join(device, process_set=process_set)
    if model is not None:
        broadcast_parameters([*model.named_parameters(), *model.named_buffers()], last, process_set)
    if optimizer is not None:
        broadcast_optimizer_state(optimizer, last, process_set=process_set)
    return last
