"""All-reduce of sparse tensors, in two phases.

First all ranks gather which rows each of them has (through the CPU: the program has to know). Then all have
the same information, and choose the same method for the rows themselves: if few rows are shared by several
ranks, they are gathered too and added up locally ("gather"); else a dense all-reduce of the rows that any
rank has moves less ("reduce").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings import request as core
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops.handles import Handle, start
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import (
    ALLGATHER,
    ALLREDUCE,
    Average,
    Collective,
    Reduction,
    averages_over_contributors,
    numbered_name,
    reduction,
)
from sirtaki.common.training.round_checks import RoundChecks
from sirtaki.torch import device
from sirtaki.torch.ops.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.ops.compression import Compression, Compressor
from sirtaki.torch.ops.tensors import is_reachable
from sirtaki.torch.training.compressed.method import PhasedExchange, Phases
from sirtaki.torch.training.parameters import NamedParameter
from sirtaki.torch.training.stage import ExchangeOptions, Stage

_NEW, _ABSENT = -1, -2  # the first of a rank's row numbers


class SparseReduction:
    """A sparse all-reduce in flight. Calling it, or `wait()`, waits and returns the result.

    Attributes:
        chosen: the method for the rows, "gather" or "reduce"; None as long as that is not known, and if the
            tensor is absent on all ranks.
    """

    def __init__(
        self,
        scope: CollectiveScope,
        how: Reduction,
        tensor: Tensor,
        compression: type[Compressor] = Compression.none,
        is_new: bool = True,
    ) -> None:
        self.chosen: str | None = None
        self._scope, self._how, self._compression = scope, how, compression
        tensor = tensor.detach().coalesce()
        self._shape, self._dimensions = tensor.shape, tensor.sparse_dim()
        self._union = self._inverse = torch.empty(0, dtype=torch.int64)
        self._contributors = 0
        phases = self._phases(self._row_numbers(tensor.indices()).cpu(), tensor.values(), is_new)
        in_stream = device.this_stream(device.ordinal(tensor.values()))
        self._phased = PhasedExchange(scope.context, phases, in_stream)

    def wait(self) -> Tensor | None:
        """Returns the result, a coalesced sparse tensor; None if the tensor is absent on all ranks.

        Raises:
            HorovodInternalError: the operation failed.
        """
        handle = self._phased.wait()
        if handle is None:
            return None
        rows = self._compression.decompress(handle.wait(), self._undo)
        if self.chosen == "gather":
            rows = self._sum_rows(rows)
        shape = self._shape[: self._dimensions]
        indices = torch.stack(torch.unravel_index(self._union, shape)).to(rows.device)
        return torch.sparse_coo_tensor(indices, rows, self._shape, is_coalesced=True, check_invariants=False)

    __call__ = wait

    def _start(self, collective: Collective, tensor: Tensor, part: str) -> Handle[Any]:
        scope = self._scope.derived(part)
        options = scope.options(self._how)
        return start(scope.context, COLLECTIVES.single(scope.context, collective, tensor, options))

    def _row_numbers(self, indices: Tensor) -> Tensor:
        """Returns a number for each column of indices: its position in row-major order."""
        numbers = indices.new_zeros(indices.shape[1])
        for extent, along in zip(self._shape, indices, strict=False):
            numbers = numbers * extent + along
        return numbers

    def _phases(self, own: Tensor, values: Tensor, is_new: bool) -> Phases[Handle[Tensor] | None]:
        """Gathers row numbers, and returns the exchange of the rows; None if no rank has anything new.

        The thread that waits for the rows does that in a stream of its own.
        """
        marked = torch.cat([torch.tensor([_NEW if is_new else _ABSENT]), own])
        gathered = yield self._start(ALLGATHER, marked, "numbers")
        if not (gathered == _NEW).any():
            return None
        numbers = gathered[gathered >= 0]
        self._contributors = len(gathered) - len(numbers)  # ranks that have joined send no mark
        self._union, self._inverse = numbers.unique(return_inverse=True)
        adds_up = self._how.op in (core.SUM, core.AVERAGE)
        self.chosen = "gather" if adds_up and len(numbers) < 2 * len(self._union) else "reduce"
        values, self._undo = self._compression.compress(values)
        if self.chosen == "gather":
            return self._start(ALLGATHER, values, "rows")
        rows = values.new_zeros(len(self._union), *values.shape[1:])
        rows[torch.searchsorted(self._union, own).to(values.device)] = values
        return self._start(ALLREDUCE, rows, "rows")

    def _sum_rows(self, rows: Tensor) -> Tensor:
        """Returns the sums or averages of the rows with the same number, in the order of ranks."""
        wide = rows.dtype if rows.element_size() > 2 else torch.float32
        total = rows.new_zeros(len(self._union), *rows.shape[1:], dtype=wide)
        total.index_add_(0, self._inverse.to(rows.device), rows.to(wide) * self._how.prescale)
        factor = self._how.postscale
        if self._how.op == core.AVERAGE:
            scope = self._scope
            over_contributors = averages_over_contributors(scope.context)
            factor /= self._contributors if over_contributors else len(scope.ranks)
        return (total * factor).to(rows.dtype)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> SparseReduction:
    """Works like `sparse_allreduce`, without waiting: calling the result waits, and returns the tensor.

    Example:
        embedding = torch.nn.Embedding(1000, 16, sparse=True)
        embedding(torch.tensor([hvd.rank(), 5])).sum().backward()
        reduction = hvd.sparse_allreduce_async(embedding.weight.grad)
        loss = loss_of(model, inputs, targets)  # meanwhile
        embedding.weight.grad = reduction()
    """
    if not (isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo and is_reachable(tensor)):
        raise UnsupportedError(
            "sparse_allreduce takes a sparse COO tensor in the memory of the CPU or of a GPU of NVIDIA; use "
            "allreduce for dense ones, and tensor.to_sparse_coo() for other layouts"
        )
    context = current()
    if name is None:
        name = numbered_name(context, "sparse_allreduce", process_set.number(context))
    return SparseReduction(CollectiveScope(context, name, process_set), reduction(op, None), tensor)


def sparse_allreduce(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Combines a sparse tensor over all ranks of the set. All of them must call it.

    Only rows (slices of the dense dimensions) that a rank has are sent. Autograd does not track it.

    Args:
        tensor: a sparse COO tensor, of one shape, dtype and number of sparse dimensions on all ranks.
        name: identifies the operation on all ranks.
        op: as for `allreduce`; missing rows count as zeros.
        process_set: the ranks that take part.

    Returns:
        A new coalesced sparse tensor, the same on every rank, with the rows that any rank has.

    Raises:
        ValueError: another tensor, an unknown op, a set that this rank does not belong to.
        MismatchError: ranks disagree about dtype, the dense dimensions, or op.
        PeerLostError: a rank died.

    Example:
        embedding = torch.nn.Embedding(1000, 16, sparse=True)
        embedding(torch.tensor([hvd.rank(), 5])).sum().backward()
        gradient = hvd.sparse_allreduce(embedding.weight.grad)  # on 2 ranks: the rows 0, 1 and 5
    """
    result = sparse_allreduce_async(tensor, name, op, process_set)()
    assert result is not None  # it is new on this rank
    return result


# ---- Gradients that are sparse on some rank ------------------------------------------------------------
# The ranks learn from each other which ones are sparse: the first time, a sparse gradient is exchanged as a
# dense one, and the checks of the round carry a mark for it. From then on all ranks send its rows, including
# those whose own passes have never touched it.


class SparseGradients(Stage):
    """The set of sparse gradients, and the exchange of their rows."""

    def __init__(self, options: ExchangeOptions, named: Sequence[NamedParameter]) -> None:
        super().__init__(options, named)
        self._dimensions = [0] * len(named)  # number of sparse dimensions that all ranks know of
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

    def learn(self, marks: Sequence[int]) -> bool:
        """Records the sparse dimensions that all ranks have learned of in a round, by index.

        Returns whether rows of any gradient are exchanged from now on.
        """
        self._dimensions = list(map(max, self._dimensions, marks))
        if not self._options.sparse_as_dense:
            self._known = {index for index, count in enumerate(self._dimensions) if count}
        return bool(self._known)

    def start(self, indices: list[int], absent: bool) -> list[int]:
        if self._known.isdisjoint(indices):
            return indices
        for index in indices:
            if index in self._known:
                scope, rows = replace(self._scope, name=self._names[index]), self._as_rows(index)
                self._in_flight[index] = SparseReduction(
                    scope, self._how, rows, self._compression, not absent
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
        for index, handle in self._in_flight.items():
            result = handle.wait()
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
