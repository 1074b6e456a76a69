"""The whole state of an optimizer, made of the slices of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sirtaki.torch.sharded.optimizer import Sharded
from sirtaki.torch.sharded.whole_values import whole_values


def full_state_dict(optimizer: torch.optim.Optimizer, root_rank: int | None = None) -> dict[str, Any]:
    """Returns an optimizer's whole state, as the plain optimizer's `state_dict()`. All ranks must call it.

    It loads into the plain optimizer, and with `optimizer.load_state_dict()` into one with shard= on any
    number of ranks. For an optimizer without shard= it is `optimizer.state_dict()`.

    Args:
        optimizer: the optimizer.
        root_rank: the only rank that gets the state, so that the others need no memory for it; they get an
            empty dictionary. None: all ranks get it.

    Raises:
        PeerLostError: a rank died.
    """
    if not isinstance(optimizer, Sharded):
        return optimizer.state_dict()
    scope = optimizer._sharding_scope.derived("full state")
    slices = optimizer._slices()
    values = whole_values(scope, optimizer.state, slices)
    state: dict[Tensor, dict[str, Any]] = {}
    is_kept = root_rank is None or scope.context.rank == root_rank
    for slice_, whole in zip(slices, values, strict=True):
        if whole and is_kept:
            state[slice_.parameter] = whole
    return optimizer._full_state_dict(state) if is_kept else {}
