"""Sparse tensors and gradients: the results equal those of dense ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import assert_alike, assert_same_on_all_ranks, fill

OPS = {"Sum": hvd.Sum, "Average": hvd.Average, "Max": hvd.Max}


def sparse(rank: int, rows: int, used: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns a rank's tensor of rows x 3, with `used` entries, some of them of the same row."""
    places = (torch.arange(used) * (rank + 2) + rank) % rows
    numbers = torch.arange(used * 3).view(used, 3).to(dtype) % 7 * 12 * (rank + 1)
    return torch.sparse_coo_tensor(places.unsqueeze(0), numbers, (rows, 3))


def combined(parts: list[Tensor], op: str) -> Tensor:
    dense = torch.stack([part.to_dense() for part in parts])
    return {"Sum": dense.sum(0), "Average": dense.sum(0) / len(parts), "Max": dense.amax(0)}[op]


@case(op=OPS)
def as_dense_ones(op: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for rows, used in ((50, 4), (5, 8), (9, 0)):
            everyone = [sparse(rank, rows, used * (rank + 1) % 9, dtype) for rank in range(hvd.size())]
            name = f"{dtype}.{rows}"
            result = hvd.sparse_allreduce(everyone[hvd.rank()], name=name, op=OPS[op])
            assert result.is_sparse
            assert result.is_coalesced()
            assert result.dtype == dtype
            expected = combined([one.double() for one in everyone], op)
            torch.testing.assert_close(result.to_dense().double(), expected, rtol=0.01, atol=1e-9)
            if dtype == torch.float64:
                torch.testing.assert_close(result.to_dense(), expected)


@case()
def several_sparse_dimensions() -> None:
    mine = torch.zeros(4, 5)
    mine[hvd.rank() % 4, 2] = 1.0
    mine[3, 4] = 2.0
    result = hvd.sparse_allreduce(mine.to_sparse(), op=hvd.Sum)
    torch.testing.assert_close(result.to_dense(), hvd.allreduce(mine, op=hvd.Sum))
    assert result.sparse_dim() == 2


@case()
def the_way_that_moves_less_is_chosen() -> None:
    apart = torch.sparse_coo_tensor([[hvd.rank()]], torch.ones(1, 2), (10, 2))
    handle = hvd.sparse_allreduce_async(apart, name="apart", op=hvd.Sum)
    handle()
    assert handle.chosen == "gather"
    together = torch.sparse_coo_tensor([[3, 4]], torch.ones(2, 2), (10, 2))
    handle = hvd.sparse_allreduce_async(together, name="together", op=hvd.Sum)
    assert handle().to_dense()[3].tolist() == [float(hvd.size())] * 2
    assert handle.chosen == ("reduce" if hvd.size() > 1 else "gather")


@case(dense_between=[False, True])
def ranks_that_wait_in_another_order(dense_between: bool) -> None:
    names = ["a", "b", "c"]
    for _ in range(3):
        mine = names if hvd.rank() % 2 == 0 else names[::-1]
        handles = {
            name: hvd.sparse_allreduce_async(sparse(hvd.rank(), 20, 5), name, hvd.Sum) for name in mine
        }
        if dense_between and hvd.rank() % 2:
            hvd.allreduce(torch.ones(3), name="dense")
        results = {name: handles[name]() for name in mine}
        if dense_between and not hvd.rank() % 2:
            hvd.allreduce(torch.ones(3), name="dense")
        expected = combined([sparse(rank, 20, 5) for rank in range(hvd.size())], "Sum")
        assert all(torch.equal(one.to_dense(), expected) for one in results.values())


@case(least=2)
def mistakes() -> None:
    for wrong in (torch.ones(3), torch.eye(3).to_sparse_csr(), [1.0]):
        with pytest.raises(ValueError, match="sparse COO"):
            hvd.sparse_allreduce(wrong)
    mine = torch.sparse_coo_tensor([[1]], torch.ones(1, 2 + hvd.rank() % 2), (4, 2 + hvd.rank() % 2))
    with pytest.raises(hvd.MismatchError, match="table"):
        hvd.sparse_allreduce(mine, name="table")
    assert hvd.allreduce(torch.ones(()), op=hvd.Sum) == hvd.size()


class Words(nn.Module):
    """A table of which each rank uses some rows, a table that few ranks use at times, and a dense layer."""

    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4, sparse=is_sparse)
        self.seldom = nn.Embedding(8, 4, sparse=is_sparse)
        self.last = nn.Linear(4, 2)
        fill(self.double())

    def forward(self, step: int, rank: int) -> Tensor:
        hidden = self.table((torch.arange(6) * (rank + 1) + step) % 30)
        if (rank + step) % 3 == 0:
            hidden = hidden + self.seldom(torch.tensor([rank, step, 1, 1, 0, 7]))
        return self.last(hidden.tanh()).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def sparse_adam(model: Words) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam([model.table.weight, model.seldom.weight], lr=0.1)


def steps(model: Words, optimizer: Any, ranks: range, count: int = 5) -> nn.Module:
    """Runs steps with the mean loss of some ranks."""
    for step in range(count):
        optimizer.zero_grad()
        losses = [model(step, rank) for rank in ranks]
        (sum(losses, torch.zeros(())) / len(losses)).backward()
        optimizer.step()
    return model


def mine() -> range:
    return range(hvd.rank(), hvd.rank() + 1)


OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "as dense": {"sparse_as_dense": True},
    "groups": {"groups": 2, "gradient_predivide_factor": 2.0},
    "passes": {"backward_passes_per_step": 1, "num_groups": 1, "sparse_as_dense": True},
}


@case(options=OPTIONS)
def gradients_as_one_process(options: str) -> None:
    for make in (sgd, sparse_adam):
        ours, plain = Words(is_sparse=True), Words(is_sparse=True)
        optimizer = hvd.DistributedOptimizer(make(ours), **OPTIONS[options])
        steps(ours, optimizer, mine())
        steps(plain, make(plain), range(hvd.size()))
        if make is sgd:
            assert_alike(ours, plain)
            assert_same_on_all_ranks(ours)
        else:
            for one, other in ((ours.table, plain.table), (ours.seldom, plain.seldom)):
                torch.testing.assert_close(one.weight, other.weight)
        if hvd.size() > 1:
            assert ours.table.weight.grad.is_sparse


@case()
def gradients_in_16_bits_and_several_passes() -> None:
    ours = nn.Embedding(10, 2, sparse=True)
    nn.init.zeros_(ours.weight)
    optimizer = hvd.DistributedOptimizer(
        sgd(ours), compression=hvd.Compression.bf16, op=hvd.Sum, backward_passes_per_step=2
    )
    for _ in range(3):
        optimizer.zero_grad()
        for part in range(2):
            ours(torch.tensor([part, hvd.rank() + 2])).sum().backward()
        expected = torch.zeros(10, 2)
        expected[:2] = hvd.size()
        expected[2 : 2 + hvd.size()] = 2.0
        assert ours.weight.grad.is_sparse
        assert torch.equal(ours.weight.grad.to_dense(), expected)
        optimizer.step()


@case()
def gradients_of_a_table_that_is_also_a_dense_layer() -> None:
    """Torch makes the gradients of tied weights dense."""

    def loss(model: nn.Embedding, rank: int) -> Tensor:
        return (model(torch.tensor([rank, 1])) @ model.weight.t()).square().mean()

    ours, plain = (fill(nn.Embedding(6, 3, sparse=True).double()) for _ in range(2))
    optimizer, alone = hvd.DistributedOptimizer(sgd(ours)), sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        if step:
            loss(ours, hvd.rank()).backward()
            (sum(loss(plain, rank) for rank in range(hvd.size())) / hvd.size()).backward()
        else:
            ours(torch.tensor([hvd.rank()])).sum().backward()
            (plain(torch.arange(hvd.size())).sum() / hvd.size()).backward()
        optimizer.step()
        alone.step()
    assert_alike(ours, plain)
