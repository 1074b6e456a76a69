"""The weighted average of a few tensors over all ranks, which may take place beside further steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings.request import SUM
from sirtaki.common.handles import Handle, start
from sirtaki.common.ops import Reduction
from sirtaki.common.requests import ALLREDUCE_IN_PLACE
from sirtaki.torch.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.compression import Compressor


class Contribution(NamedTuple):
    """The part of one rank in an average.

    Attributes:
        weight: its weight, 1.0 for a complete window of steps.
        has_ended: whether this rank has no steps left, and waits for the others.
    """

    weight: float
    has_ended: bool


class Average(NamedTuple):
    """The result, equal on all ranks.

    Attributes:
        tensors: the averages; None if no rank had any weight.
        all_have_ended: whether no rank has steps left.
    """

    tensors: list[Tensor] | None
    all_have_ended: bool


class AverageInFlight:
    """An average that has been started. All ranks start the same ones, in the same order."""

    def __init__(
        self,
        scope: CollectiveScope,
        tensors: Sequence[Tensor],
        own: Contribution,
        compression: type[Compressor],
    ) -> None:
        """Starts it. The tensors belong to the average from now on: it overwrites them."""
        self._own, self._compression = own, compression
        self._tensors, self._undo = list(tensors), []
        self._handle: Handle[list[Tensor]] | None = None
        if not scope.has_no_peers:
            small = [compression.compress(_weighted(one, own.weight)) for one in tensors]
            self._undo = [undo for _, undo in small]
            # The third number counts the ranks that take part: those that have joined contribute zeros.
            header = torch.tensor([own.weight, own.has_ended, 1.0], dtype=torch.float64)
            parts = [header, *(one for one, _ in small)]
            options = scope.options(Reduction(SUM))
            operation = COLLECTIVES.group(scope.context, ALLREDUCE_IN_PLACE, parts, options)
            self._handle = start(scope.context, operation)

    def wait(self) -> Average:
        """Blocks until all ranks have started it, and returns the result."""
        if self._handle is None:
            return Average(self._tensors if self._own.weight else None, self._own.has_ended)
        header, *sums = self._handle.wait()
        weight, ended, present = header.tolist()
        if weight == 0:
            return Average(None, ended == present)
        large = [self._compression.decompress(one, undo) for one, undo in zip(sums, self._undo, strict=True)]
        return Average([one.div_(weight) for one in large], ended == present)


def _weighted(tensor: Tensor, weight: float) -> Tensor:
    """Multiplies in place. Elements that are not finite count as zero in a rank that has no weight."""
    if weight == 0:
        return tensor.zero_()
    return tensor if weight == 1 else tensor.mul_(weight)
