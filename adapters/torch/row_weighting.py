"""The weights of a rank's gradients where the ranks share one batch, and may have unequal numbers of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sirtaki.common.shares import Share
from sirtaki.torch.parameters import NamedParameter, trainable


class RowWeighting:
    """Multiplies this rank's gradients by its part of the batch, before they add up.

    Attributes:
        op: the combination of the gradients, as the program has given it.
        factor: the present factor.
    """

    def __init__(self, named: Sequence[NamedParameter], op: int) -> None:
        self._named, self.op = named, op
        self.factor = 1.0
        self._hooks: list[tuple[Any, Any]] = []  # nodes, held so that they live, and their hooks

    def count_by_rows(self, share: Share | None) -> None:
        """Makes this rank's gradients count by its rows of a batch from now on; None: as those of others.

        The gradients of each pass are multiplied before they add up, so that passes of several batches do.
        """
        self.remove()
        factor = self.factor = 1.0 if share is None else share.gradient_factor(self.op)
        if factor != 1.0:
            for _, parameter, _ in self._named:
                # A hook of the tensor would be called by torch.autograd.grad, too.
                with trainable(parameter):
                    node = get_gradient_edge(parameter).node
                hook = node.register_prehook(lambda given: (_times(given[0], factor),))
                self._hooks.append((node, hook))

    def remove(self) -> None:
        """Removes the hooks."""
        while self._hooks:
            self._hooks.pop()[1].remove()

    @torch.no_grad()
    def multiply(self, indices: Iterable[int]) -> None:
        """Makes gradients that no pass has made count by rows."""
        for index in indices if self.factor != 1.0 else ():
            parameter = self._named[index].parameter
            if parameter.grad is not None:
                parameter.grad = _times(parameter.grad, self.factor)


def _times(gradient: Tensor, factor: float) -> Tensor:
    """Returns a gradient times a factor: zeros for 0, whatever the gradient holds."""
    return gradient * factor if factor else torch.zeros_like(gradient)
