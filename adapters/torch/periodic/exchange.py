"""The weighted average of a few tensors over all ranks, which may take place beside further steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings.request import SUM
from sirtaki.common.handles import Handle, start
from sirtaki.common.ops import Reduction
from sirtaki.common.requests import ALLREDUCE_IN_PLACE
from sirtaki.torch.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.compressed.exchange import METHODS
from sirtaki.torch.compressed.method import Link, Slot, compute_dtype
from sirtaki.torch.compressed.state import CompressionState
from sirtaki.torch.periodic.format import Format


class Contribution(NamedTuple):
    """The part of one rank in an average.

    Attributes:
        weight: its weight, 1.0 for a complete window of steps.
        has_ended: whether this rank has no steps left, and waits for the others.
        is_rewritten: whether the program has set the parameters since the last average, as on all ranks.
    """

    weight: float
    has_ended: bool
    is_rewritten: bool = False


class Parts(NamedTuple):
    """The tensors of one rank.

    Attributes:
        parameters: parameters or their differences, which may be compressed.
        buffers: exchanged exactly.
        owners: the parameters themselves, by which a memory knows their differences.
    """

    parameters: Sequence[Tensor]
    buffers: Sequence[Tensor] = ()
    owners: Sequence[Tensor] = ()


class Average(NamedTuple):
    """The result, equal on all ranks.

    Attributes:
        tensors: the averages of parameters, then of buffers; None if no rank had any weight.
        all_have_ended: whether no rank has steps left.
    """

    tensors: list[Tensor] | None
    all_have_ended: bool


class AverageInFlight:
    """An average that has been started. All ranks start the same ones, in the same order."""

    def __init__(
        self, scope: CollectiveScope, parts: Parts, own: Contribution, exchange_format: Format
    ) -> None:
        """Starts it. The tensors belong to the average from now on: it overwrites them."""
        self._own, self._format = own, exchange_format
        self._exact: Handle[list[Tensor]] | None = None
        self._encoded: Handle[list[Tensor]] | None = None
        self._compressed: _CompressedSums | None = None
        self._tensors = [*parts.parameters, *parts.buffers]
        if scope.has_no_peers:
            return
        if exchange_format.memory is not None:
            self._compressed = _CompressedSums(scope, exchange_format.memory, parts, own.weight)
            parts = parts._replace(parameters=self._compressed.others)
        tensors = [*parts.parameters, *parts.buffers]
        # The third number counts the ranks that take part: those that have joined contribute zeros.
        header = torch.tensor([own.weight, own.has_ended, 1.0, own.is_rewritten], dtype=torch.float64)
        # Divided by the number of ranks, no sum of weighted values leaves the range of 16 bits.
        self._shares = [1.0 / len(scope.ranks) if tensor.element_size() == 2 else 1.0 for tensor in tensors]
        pairs = zip(tensors, self._shares, strict=True)
        weighted = [_weighted(one, own.weight * share) for one, share in pairs]
        small = [self._format.compress(one) for one in weighted[: len(parts.parameters)]]
        self._undo = [undo for _, undo in small]
        sent = [one for one, _ in small]
        self._is_encoded = [self._format.encodes(one) for one in sent]
        exact = [one for one, is_encoded in zip(sent, self._is_encoded, strict=True) if not is_encoded]
        encoded = [one for one, is_encoded in zip(sent, self._is_encoded, strict=True) if is_encoded]
        self._exact = _start(scope, [header, *exact, *weighted[len(sent) :]], Reduction(SUM))
        if encoded:
            assert self._format.wire_format is not None
            how = Reduction(SUM, wire_format=self._format.wire_format.code)
            self._encoded = _start(scope.derived("encoded"), encoded, how)

    def wait(self) -> Average:
        """Blocks until all ranks have started it, and returns the result.

        Raises:
            ValueError: the program has set the parameters on some ranks only.
        """
        if self._exact is None:
            return Average(self._tensors if self._own.weight else None, self._own.has_ended)
        header, *exact = self._exact.wait()
        encoded = iter(self._encoded.wait() if self._encoded is not None else ())
        compressed = self._compressed.wait() if self._compressed is not None else {}
        weight, ended, present, rewritten = header.tolist()
        if 0 < rewritten < present:
            raise ValueError(
                f"the program has set the parameters between two synchronizations on {rewritten:.0f} of "
                f"{present:.0f} ranks, {'also' if self._own.is_rewritten else 'not'} on this one: set them "
                "to the same values on all ranks, as hvd.broadcast_parameters(model.state_dict(), 0) does"
            )
        if weight == 0:
            return Average(None, ended == present)
        others = iter(exact)
        sums = [next(encoded if is_encoded else others) for is_encoded in self._is_encoded]
        large = [self._format.decompress(one, undo) for one, undo in zip(sums, self._undo, strict=True)]
        pairs = zip((*large, *others), self._shares, strict=True)
        averages = [one.div_(weight * share) for one, share in pairs]
        for index, slot in compressed.items():  # in ascending order
            averages.insert(index, slot.values.div_(weight).to(slot.parameter.dtype))
        return Average(averages, ended == present)


class _CompressedSums:
    """Weighted sums of differences that each rank compresses, adding to them what it has left out before.

    What is left out has no weight: a rank multiplies what it sends. A rank without weight sends zeros, and
    keeps what it has left out. (Sarfi et al., SparseLoCo, arXiv 2508.15706.)

    Attributes:
        others: the differences that are not compressed.
    """

    def __init__(self, scope: CollectiveScope, memory: CompressionState, parts: Parts, weight: float) -> None:
        self._memory, self._weight = memory, weight
        self._method = METHODS[type(memory.compression)](
            memory, Link(scope.derived("compressed"), Reduction(SUM))
        )
        is_exact = memory.exchanges < memory.compression.start
        memory.exchanges += 1
        self.others: list[Tensor] = []
        self._slots: dict[int, Slot] = {}
        for index, (owner, difference) in enumerate(zip(parts.owners, parts.parameters, strict=True)):
            if is_exact or not self._method.compresses(owner):
                self.others.append(difference)
            else:
                self._slots[index] = self._slot(owner, difference)
        self._phased = self._method.start(self._slots) if self._slots else None

    def _slot(self, owner: Tensor, difference: Tensor) -> Slot:
        dtype = compute_dtype(owner.dtype)
        values = difference.to(dtype).contiguous()
        residual = self._memory.residual(owner, dtype)
        if residual is not None:
            values += residual
        return Slot(owner, _weighted(values, self._weight), is_new=True)

    def wait(self) -> Mapping[int, Slot]:
        """Returns the sums by the indices of their parameters, once all ranks have started them.

        If a value is not finite on any rank, this rank keeps what it has left out before.
        """
        if self._phased is None:
            return {}
        keeps = self._phased.wait() and self._weight > 0
        for slot in self._method.end(self._slots, keeps):
            residual = self._memory.residuals.get(slot.parameter) if keeps else None
            if residual is not None and self._weight != 1:
                residual.div_(self._weight)
        return self._slots


def _start(scope: CollectiveScope, tensors: Sequence[Tensor], how: Reduction) -> Handle[list[Tensor]]:
    operation = COLLECTIVES.group(scope.context, ALLREDUCE_IN_PLACE, tensors, scope.options(how))
    return start(scope.context, operation)


def _weighted(tensor: Tensor, weight: float) -> Tensor:
    """Multiplies in place. Elements that are not finite count as zero in a rank that has no weight."""
    if weight == 0:
        return tensor.zero_()
    return tensor if weight == 1 else tensor.mul_(weight)
