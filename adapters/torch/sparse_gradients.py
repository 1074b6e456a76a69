"""Gradients that are sparse on some rank.

The ranks learn from each other which ones are sparse: the first time, a sparse gradient is exchanged as a
dense one, and the checks of the round carry a mark for it. From then on all ranks send its rows, including
those whose own passes have never touched it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sirtaki.common.ops import Reduction
from sirtaki.common.round_checks import RoundChecks
from sirtaki.torch.autograd import CollectiveScope
from sirtaki.torch.compressed.exchange import CompressedGradients
from sirtaki.torch.compressed.state import CompressionState
from sirtaki.torch.compression import Compressor
from sirtaki.torch.overlapped.exchange import UrgentGradients
from sirtaki.torch.overlapped.flight import Flight
from sirtaki.torch.parameters import NamedParameter
from sirtaki.torch.sharded.exchange import ScatteredGradients
from sirtaki.torch.sharded.slices import Partition
from sirtaki.torch.sparse import SparseReduction


class SpecialExchange(Protocol):
    """An exchange that takes some gradients, given by their numbers, and leaves the others."""

    @property
    def is_open(self) -> bool:
        """Returns whether a round has begun and not ended."""

    def start(self, numbers: list[int], absent: bool) -> list[int]:
        """Takes gradients that are new on this rank, or absent; returns the others."""

    def start_phases(self) -> None:
        """Starts what needs all gradients of a round."""

    def finish(self, exact: Iterable[Tensor]) -> None:
        """Waits, and puts the results in place. `exact` are the results of the others."""

    def discard(self) -> None:
        """Ends the round, whether it has succeeded or not."""

    def drop_earlier(self) -> None:
        """Forgets what earlier rounds have left to be added to gradients that are dropped."""

    def close(self) -> None:
        """Releases the parameters."""


@dataclass(frozen=True)
class ExchangeOptions:
    """The options of an optimizer's gradient exchange: ranks, combination, and format.

    Attributes:
        scope, how: the ranks, and the combination.
        compression: the format of all gradients that are not compressed with a memory.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones.
        memory: of a compression that has one; None otherwise.
        partition: the slices of gradients that are divided among the ranks; None otherwise.
        overlaps_forward: whether gradients may still be in flight in the next forward pass.
        in_shared_memory: whether gradients live in memory that the ranks of a host share.
    """

    scope: CollectiveScope
    how: Reduction
    compression: type[Compressor]
    sparse_as_dense: bool = False
    memory: CompressionState | None = None
    partition: Partition | None = None
    overlaps_forward: bool = False
    in_shared_memory: bool = False

    def special_exchange(self, named: Sequence[NamedParameter]) -> SpecialExchange | None:
        """Returns the exchange of those that are not simply all-reduced; None if there are none."""
        if not named:
            return None
        if self.partition is not None:
            return ScatteredGradients(self.partition, self.scope, self.how, self.compression, named)
        if self.memory is not None:
            return CompressedGradients(self.memory, self.scope, self.how, named)
        if self.overlaps_forward:
            gradients = UrgentGradients(self.scope, self.how, self.compression, named)
            return Flight(gradients, [one.parameter for one in named])
        return None


class SparseGradients:
    """The set of sparse gradients, and the exchange of their rows."""

    def __init__(self, exchange_options: ExchangeOptions, named: Sequence[NamedParameter]) -> None:
        self._exchange_options = exchange_options
        self._names = [one.name for one in named]
        parameters = [one.parameter for one in named]
        self._parameters = parameters
        self._dimensions = [0] * len(parameters)  # number of sparse dimensions that all ranks know of
        self._known: set[int] = set()  # those whose rows are exchanged
        self._in_flight: dict[int, SparseReduction] = {}

    @property
    def is_open(self) -> bool:
        return bool(self._in_flight)

    def dimensions(self, index: int) -> int:
        """Returns how many dimensions of this gradient are known to all ranks as sparse."""
        return self._dimensions[index]

    def mark(self, index: int, gradient: Tensor, checks: RoundChecks) -> None:
        """Tells the other ranks that this rank has seen a sparse gradient."""
        if self._dimensions[index] < gradient.sparse_dim():
            checks.mark(index, gradient.sparse_dim())

    def learn(self, marks: Sequence[int]) -> None:
        """Records the sparse dimensions that all ranks have learned of in a round, by index."""
        if not any(marks):
            return
        self._dimensions = list(map(max, self._dimensions, marks))
        if not self._exchange_options.sparse_as_dense:
            self._known = {index for index, count in enumerate(self._dimensions) if count}

    def start(self, indices: list[int], absent: bool) -> list[int]:
        """Starts the exchange of those gradients whose rows are exchanged; returns the others."""
        if self._known.isdisjoint(indices):
            return indices
        for index in indices:
            if index in self._known:
                exchange_options = self._exchange_options
                scope = replace(exchange_options.scope, name=self._names[index])
                self._in_flight[index] = SparseReduction(
                    scope,
                    exchange_options.how,
                    self._as_rows(index),
                    exchange_options.compression,
                    not absent,
                )
        return [index for index in indices if index not in self._known]

    def _as_rows(self, index: int) -> Tensor:
        parameter, dimensions = self._parameters[index], self._dimensions[index]
        gradient = parameter.grad
        if gradient is not None:
            return gradient if gradient.is_sparse else gradient.detach().to_sparse(dimensions)
        indices = torch.empty(dimensions, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[dimensions:])
        return torch.sparse_coo_tensor(
            indices, values, parameter.shape, is_coalesced=True, check_invariants=False
        )

    def store_results(self) -> list[Tensor]:
        """Waits for the rows in flight, and stores them as gradients. Returns those."""
        stored: list[Tensor] = []
        for index, reduction in self._in_flight.items():
            result = reduction.wait()
            if result is None:  # absent on all ranks
                continue
            parameter = self._parameters[index]
            was_dense = parameter.grad is not None and not parameter.grad.is_sparse
            parameter.grad = result.to_dense() if was_dense else result
            stored.append(result)
        self._in_flight = {}
        return stored

    def discard(self) -> None:
        """Handles the failure of the round."""
        self._in_flight = {}
