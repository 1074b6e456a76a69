"""A hint for optimizers whose steps do nothing: their parameters are not those of the model that trains.

It is given once, on rank 0. A program makes the optimizer first, and replaces the model or its parameters
afterwards; the steps of both then run without an error.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sirtaki.common.hints import hint

_STEPS = 3  # in a row that did nothing
_SAMPLED = 64  # elements
_REMEDY = (
    "Was the model copied, or were its parameters replaced, after the optimizer was made? Make the optimizer "
    "with the parameters of the model that trains, and then call hvd.DistributedOptimizer"
)


class IdleSteps:
    """The first steps of an optimizer, until one does something."""

    def __init__(self) -> None:
        self.is_over = False
        self._without_gradients = self._without_change = 0
        self._earlier: list[Any] | None = None  # after the step before

    def count(self, optimizer: Any) -> None:
        """Counts a step that has just ended, and hints at steps that did nothing."""
        if self.is_over:
            return
        parameters: list[Tensor] = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        earlier, self._earlier = self._earlier, _state_of(parameters)
        self._without_gradients = 0 if has_gradients else self._without_gradients + 1
        self._without_change = self._without_change + 1 if has_gradients and self._earlier == earlier else 0
        kind = type(optimizer).__name__
        if self._without_gradients == _STEPS:
            what = (
                f"{_STEPS} steps of {kind} in which none of its {len(parameters)} parameters had a gradient"
            )
        elif self._without_change == _STEPS:
            what = f"{_STEPS} steps of {kind} that changed none of its {len(parameters)} parameters"
        else:
            self.is_over = has_gradients and earlier not in (None, self._earlier)
            return
        self.is_over = True
        if optimizer._scope.context.rank == 0:
            hint(f"{what}: the ranks train nothing. {_REMEDY}")


def _state_of(parameters: list[Tensor]) -> list[Any]:
    """Returns what a step changes: how often parameters were written, and the values of the smallest.

    Fused updates are not counted as writes.
    """
    smallest = min(
        (parameter for parameter in parameters if parameter.grad is not None), key=Tensor.numel, default=None
    )
    values = [] if smallest is None else smallest.detach().flatten()[:_SAMPLED].tolist()
    return [values, *[parameter._version for parameter in parameters]]
