"""Closures of optimizers: reduces their gradients, and a loss that decides about the step, over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from sirtaki.common.ops.reduction import Reduction
from sirtaki.common.ops.requests import ALLREDUCE
from sirtaki.torch.ops.autograd import CollectiveScope


class ReducedClosure:
    """A closure that reduces its gradients over all ranks, and its loss if the optimizer decides by it."""

    def __init__(self, closure: Callable[[], Any], optimizer: Any) -> None:
        """Wraps the closure of a step. `optimizer` is distributed."""
        self._closure, self._optimizer = closure, optimizer
        self._has_been_called = False
        # Other optimizers of torch only return the loss.
        decides_by_loss = isinstance(optimizer, torch.optim.LBFGS)
        is_whole = optimizer._reducer.is_idle or optimizer._settings.has_whole_losses
        self._exchanges_loss = decides_by_loss and not is_whole

    def __call__(self) -> Any:
        optimizer = self._optimizer
        # Each call makes its own gradients; before the first, the program may have written some by hand.
        optimizer._reducer.stepped(has_used=self._has_been_called)
        self._has_been_called = True
        loss = self._closure()
        optimizer._prepare_update()
        optimizer._replace_groups()
        if not self._exchanges_loss:
            return loss
        weight = optimizer._reducer.weighting.factor
        return reduced_loss(loss, optimizer._scope, optimizer._settings.reduction(), weight)


def reduced_loss(loss: Any, scope: CollectiveScope, how: Reduction, weight: float) -> Any:
    """Returns a closure's loss, combined over the ranks as the gradients are. All ranks must call it.

    Args:
        loss: a number, also one of numpy, or a tensor with one element; anything else is returned as it is.
        scope: the ranks.
        how: the combination of the gradients.
        weight: the factor of this rank's gradients; 0 if the rank has no rows, so no loss.

    Returns:
        The same on all ranks, without a graph: a tensor like the rank's own, or a number.
    """
    is_tensor = isinstance(loss, Tensor) and loss.numel() == 1
    is_number = isinstance(loss, SupportsFloat) and getattr(loss, "ndim", 0) == 0
    if not (is_tensor or is_number):
        return loss
    value = float(loss.detach() if is_tensor else loss)
    own = torch.tensor(value * weight if weight else 0.0, dtype=torch.float64)
    total = float(scope.derived("loss").run(ALLREDUCE, own, how))
    return torch.full_like(loss, total, requires_grad=False) if is_tensor else total
