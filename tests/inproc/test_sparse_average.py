"""The divisor of an average of sparse tensors while ranks have joined: a setting."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from world import world

import sirtaki.torch as hvd


@pytest.mark.parametrize(("setting", "divisors"), [("all", [3, 3, 3]), ("contributors", [3, 2, 1])])
@pytest.mark.parametrize("shares_rows", [False, True])
def test_a_sparse_average_divides_as_a_dense_average(
    setting: str, divisors: list[int], shares_rows: bool
) -> None:
    """Rows that are gathered, as no two ranks have the same, and rows that are reduced."""

    def rows_of(rank: int) -> Tensor:
        indices = torch.tensor([[0, 1] if shares_rows else [2 * rank, 2 * rank + 1]])
        return torch.sparse_coo_tensor(indices, torch.full((2, 4), 12.0 * (rank + 1)), (6, 4))

    def body() -> None:
        for step in range(hvd.rank() + 1):  # rank r takes r + 1 steps
            whole = torch.stack([rows_of(rank).to_dense() for rank in range(step, 3)]).sum(0)
            mean = hvd.sparse_allreduce(rows_of(hvd.rank()), name="rows")
            assert torch.equal(mean.to_dense(), whole / divisors[step])
            assert torch.equal(mean.to_dense(), hvd.allreduce(rows_of(hvd.rank()).to_dense(), name="dense"))
        assert hvd.join() == 2

    with world(3, join_average=setting) as ranks:
        ranks.run(body)
