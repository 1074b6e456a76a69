"""Gradients that are sparse on some rank.

The ranks learn from each other which ones are sparse: the first time, a sparse gradient is exchanged as a
dense one, and the checks of the round carry a mark for it. From then on all ranks send its rows, including
those whose own passes have never touched it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sirtaki.common.round_checks import RoundChecks
from sirtaki.torch.exchange_options import ExchangeOptions
from sirtaki.torch.parameters import NamedParameter
from sirtaki.torch.sparse import SparseReduction
from sirtaki.torch.stage import Stage


class SparseGradients(Stage):
    """The set of sparse gradients, and the exchange of their rows."""

    def __init__(self, exchange_options: ExchangeOptions, named: Sequence[NamedParameter]) -> None:
        self._options = exchange_options
        self._names = [entry.name for entry in named]
        parameters = [entry.parameter for entry in named]
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
        if not self._options.sparse_as_dense:
            self._known = {index for index, count in enumerate(self._dimensions) if count}

    def start(self, indices: list[int], absent: bool) -> list[int]:
        if self._known.isdisjoint(indices):
            return indices
        for index in indices:
            if index in self._known:
                options, rows = self._options, self._as_rows(index)
                scope = replace(options.scope, name=self._names[index])
                self._in_flight[index] = SparseReduction(
                    scope, options.how, rows, options.compression, not absent
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

    @torch.no_grad()
    def finish(self, reduced: Sequence[Tensor]) -> list[Tensor]:
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
        self._in_flight = {}
