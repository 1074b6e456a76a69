"""Adasum compared with its definition, in plain numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import sirtaki.numpy as hvd
from cases import case


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    ab, aa, bb = float(np.sum(a * b)), float(np.sum(a * a)), float(np.sum(b * b))
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def tree(vectors: list[np.ndarray]) -> np.ndarray:
    while len(vectors) > 1:
        pairs = [pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = pairs + ([vectors[-1]] if len(vectors) % 2 else [])
    return vectors[0]


def gradient(rank: int, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, rank, count]).standard_normal(count)


@case(dtype=("float16", "bfloat16", "float32", "float64"))
def adasum(dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-12}[dtype]
    for count in (0, 1, 5, 1_000, 300_001):
        everyone = [gradient(rank, count).astype(kind) for rank in range(hvd.size())]
        result = hvd.allreduce(everyone[hvd.rank()], op=hvd.Adasum)
        expected = tree([one.astype(np.float64) for one in everyone])
        np.testing.assert_allclose(result.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@case()
def adasum_of_a_fused_group_takes_each_tensor_by_itself() -> None:
    sizes = [3, 1_000, 0, 70_001]
    mine = [gradient(hvd.rank(), count, seed=1) for count in sizes]
    for _ in range(2):
        results = hvd.grouped_allreduce(mine, op=hvd.Adasum)
        for result, count in zip(results, sizes, strict=True):
            expected = tree([gradient(rank, count, seed=1) for rank in range(hvd.size())])
            np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


@case()
def equal_gradients_average_and_orthogonal_ones_add_up() -> None:
    same = hvd.allreduce(np.full(8, 3.0), op=hvd.Adasum)
    np.testing.assert_array_equal(same, np.full(8, 3.0))
    own = np.zeros(hvd.size())
    own[hvd.rank()] = 2.0
    np.testing.assert_array_equal(hvd.allreduce(own, op=hvd.Adasum), np.full(hvd.size(), 2.0))


@case()
def adasum_does_not_scatter() -> None:
    with pytest.raises(ValueError, match="all-reduce"):
        hvd.reducescatter(np.ones(4), op=hvd.Adasum)
