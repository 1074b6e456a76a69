"""PowerSGD: each gradient, as a matrix, is communicated as the product of two narrow matrices.

T. Vogels et al., PowerSGD: practical low-rank gradient compression for distributed optimization, 2019 (arXiv
1905.13727). M is the average of the ranks' matrices, and Q a narrow matrix that the last exchange has left: P
becomes an orthonormal basis of M Q, then Q the transpose of M times P, and the result is P times the
transpose of Q. Each rank multiplies its own matrix only; the averages of the products are those of M. This is
one step of an iteration towards the largest singular values, so Q improves from exchange to exchange.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sirtaki.common.training.stateful_compression import PowerSGD
from sirtaki.torch.training.compressed.method import Link, Method, Phases, TensorSlot
from sirtaki.torch.training.compressed.state import CompressionState


class PowerSGDMethod(Method):
    """PowerSGD for an optimizer's gradients. Narrow matrices are stored by columns: [column, row]."""

    def __init__(self, state: CompressionState, link: Link) -> None:
        super().__init__(state, link)
        self._starts: dict[int, Tensor] = {}  # random matrices, the same on all ranks
        self._left: dict[int, Tensor] = {}  # P
        self._right: dict[int, Tensor] = {}  # Q
        self._own_right: dict[int, Tensor] = {}  # the transpose of this rank's matrix times P
        self._finite: set[int] = set()

    def compresses(self, parameter: Tensor) -> bool:
        """Returns whether a parameter can be viewed as a matrix that is larger than its factors."""
        if parameter.dim() < 2 or parameter.is_complex() or parameter.numel() == 0:
            return False
        rows, columns = _sides(parameter)
        return self._rank(parameter) * (rows + columns) < rows * columns

    def phases(self, slots: Mapping[int, TensorSlot]) -> Phases[bool]:
        buffers, self._left = _packed(slots, {at: self._shape(slot, 0) for at, slot in slots.items()})
        for at, slot in slots.items():
            torch.mm(self._basis(at, slot), _matrix(slot).t(), out=self._left[at])
        marks = torch.tensor([float(slot.is_new) for slot in slots.values()], device=buffers[0].device)
        yield self._link.all_reduce([*buffers, marks], "(P)")
        self._touched = [at for at, mark in zip(slots, marks.tolist(), strict=True) if mark != 0]
        self._finite = _finite(self._left, self._touched)
        if not self._touched:
            return True
        self._orthogonalize()
        buffers, self._right = _packed(slots, {at: self._shape(slot, 1) for at, slot in slots.items()})
        for at in self._touched:
            torch.mm(self._left[at], _matrix(slots[at]), out=self._right[at])
        self._own_right = {at: self._right[at].clone() for at in self._touched}
        yield self._link.all_reduce(buffers, "(Q)")
        self._finite &= _finite(self._right, self._touched)
        return len(self._finite) == len(self._touched)

    def store(self, number: int, slot: TensorSlot, residual: Tensor | None) -> None:
        left, right, matrix = self._left[number], self._right[number], _matrix(slot)
        if residual is not None:
            own = self._own_right[number]
            torch.addmm(matrix, left.t(), own, alpha=-1, out=residual.view(matrix.shape))
        if number not in self._finite:
            matrix.fill_(torch.nan)
            return
        write_product(matrix, left, right)
        largest = right.abs().amax(dim=1, keepdim=True)
        # A column that has vanished would stay zero.
        basis = torch.where(largest > 0, right / largest, self._start(number, slot))
        self._state.bases[slot.parameter] = basis

    def _rank(self, parameter: Tensor) -> int:
        compression = self._state.compression
        assert isinstance(compression, PowerSGD)
        return min(compression.rank, *_sides(parameter))

    def _shape(self, slot: TensorSlot, side: int) -> tuple[int, int]:
        return self._rank(slot.parameter), _sides(slot.parameter)[side]

    def _start(self, number: int, slot: TensorSlot) -> Tensor:
        if number not in self._starts:
            source = torch.Generator().manual_seed(number)
            random = torch.randn(self._shape(slot, 1), generator=source, dtype=slot.values.dtype)
            self._starts[number] = random.to(slot.values.device)
        return self._starts[number]

    def _basis(self, number: int, slot: TensorSlot) -> Tensor:
        """Returns Q of the last exchange. If it differs between ranks, their results are still equal."""
        basis = self._state.bases.get(slot.parameter)
        return self._start(number, slot) if basis is None else basis

    def _orthogonalize(self) -> None:
        """Orthonormalizes each P; matrices of the same dtype and shape in a single batch."""
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for at in self._touched:
            alike[self._left[at].dtype, self._left[at].shape].append(self._left[at])
        for matrices in alike.values():
            for matrix, found in zip(matrices, orthonormal(torch.stack(matrices)), strict=True):
                matrix.copy_(found)


def _sides(parameter: Tensor) -> tuple[int, int]:
    return parameter.shape[0], parameter.numel() // parameter.shape[0]


def _matrix(slot: TensorSlot) -> Tensor:
    return slot.values.view(_sides(slot.parameter))


def _packed(
    slots: Mapping[int, TensorSlot], shapes: Mapping[int, tuple[int, int]]
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Allocates zeros: a buffer for each dtype, and the matrices of these shapes as views of them."""
    numbers: dict[torch.dtype, list[int]] = defaultdict(list)
    for at, slot in slots.items():
        numbers[slot.values.dtype].append(at)
    buffers, parts = [], {}
    for dtype, members in numbers.items():
        lengths = [shapes[at][0] * shapes[at][1] for at in members]
        buffers.append(torch.zeros(sum(lengths), dtype=dtype, device=slots[members[0]].values.device))
        for at, part in zip(members, buffers[-1].split(lengths), strict=True):
            parts[at] = part.view(shapes[at])
    return buffers, parts


def _finite(matrices: Mapping[int, Tensor], numbers: list[int]) -> set[int]:
    """Returns the indices of the matrices with finite elements only."""
    if not numbers:
        return set()
    found = torch.stack([matrices[at].isfinite().all() for at in numbers]).tolist()
    return {at for at, is_finite in zip(numbers, found, strict=True) if is_finite}


# ---- Arithmetic of matrices that rounds alike on all processors ----------------------------------------

# It consists of operations on elements only, which IEEE 754 defines to the last bit. Libraries that
# multiply matrices or sum a row add in an order that depends on the processor, on the number of threads,
# and on where the memory begins; then the ranks' parameters would part by their last bits.


_NEGLIGIBLE = 1e-4  # of a column's norm: what is left of it is rounding
_BLOCK = 1 << 16  # elements of a block of rows that stays in a core's cache


def orthonormal(columns: Tensor) -> Tensor:
    """Returns orthonormal vectors that span the same space; zeros for linearly dependent vectors.

    Args:
        columns: batches of vectors, [batch, vector, element].
    """
    largest = columns.abs().amax(dim=-1, keepdim=True)
    scaled = columns / torch.where(largest > 0, largest, 1.0)  # squares neither overflow nor vanish
    found: list[Tensor] = []
    for place in range(columns.shape[1]):
        vector = scaled[:, place]
        before = _norm(vector)
        for _ in range(2):  # the second time removes what rounding has left
            parts = [_dot(other, vector) * other for other in found]
            for part in parts:
                vector = vector - part
        norm = _norm(vector)
        is_kept = norm > _NEGLIGIBLE * before
        found.append(torch.where(is_kept, vector / torch.where(is_kept, norm, 1.0), 0.0))
    return torch.stack(found, dim=1)


def _norm(vectors: Tensor) -> Tensor:
    return _dot(vectors, vectors).sqrt()


def _dot(tensor: Tensor, other: Tensor) -> Tensor:
    """Returns the products of pairs of vectors, [batch, 1], added up as a binary tree."""
    products = tensor * other
    leaves = 1 << max(products.shape[-1] - 1, 0).bit_length()
    products = torch.nn.functional.pad(products, (0, leaves - products.shape[-1]))
    while products.shape[-1] > 1:
        half = products.shape[-1] // 2
        products = products[..., :half] + products[..., half:]
    return products


def write_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Writes the sum of outer products of pairs of vectors, [vector, element], to a matrix."""
    rows = target.shape[0] if target.is_cuda else max(1, _BLOCK // max(target.shape[1], 1))
    for begin in range(0, target.shape[0], rows):
        block, factors = target[begin : begin + rows], left[:, begin : begin + rows, None]
        torch.mul(factors[0], right[0], out=block)
        for factor, vector in zip(factors[1:], right[1:], strict=True):
            block += factor * vector
