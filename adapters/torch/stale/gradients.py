"""The sum of gradients that wait for an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Contribution(NamedTuple):
    """The part of one rank in an update.

    Attributes:
        tensors: the sum of its gradients for each parameter, zeros if there was none.
        is_present: whether there was one, for each parameter.
        steps: number of steps in the sums.
    """

    tensors: list[Tensor]
    is_present: list[bool]
    steps: int


class GradientSum:
    """Sums of gradients, in memory of their own."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [one.detach() for one in parameters]
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self._count = 0

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds the gradients of a step."""
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            known = self._sums[place]
            if known is None:
                self._sums[place] = gradient.detach().clone(memory_format=torch.contiguous_format)
            else:
                known.add_(gradient.detach())
        self._count += 1

    def take(self) -> Contribution:
        """Returns the sums, and begins again with none."""
        tensors = [
            torch.zeros_like(parameter, memory_format=torch.contiguous_format) if one is None else one
            for one, parameter in zip(self._sums, self._parameters, strict=True)
        ]
        taken = Contribution(tensors, [one is not None for one in self._sums], self._count)
        self._sums, self._count = [None] * len(self._parameters), 0
        return taken
