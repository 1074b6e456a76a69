"""Arithmetic of matrices that rounds alike on all processors.

It consists of operations on elements only, which IEEE 754 defines to the last bit. Libraries that multiply
matrices or sum a row add in an order that depends on the processor, on the number of threads, and on where
the memory begins; then the ranks' parameters would part by their last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NEGLIGIBLE = 1e-4  # of a column's norm: what is left of it is rounding
_BLOCK = 1 << 16  # elements of a block of rows that stays in a core's cache


def orthonormal(columns: Tensor) -> Tensor:
    """Returns vectors that span the same space, orthogonal and of norm 1; zeros for those that add nothing.

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


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Returns the products of pairs of vectors, [batch, 1], added up as a binary tree."""
    products = one * other
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
