"""Training of some of the ranks, of ranks that run out of data, and the divisors of steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    batch,
    distributed,
    loss_of,
    network,
    own_loss,
    sgd,
    train,
)
from sirtaki.torch import device


def loss_of_ranks(model: nn.Module, step: int, ranks: list[int]) -> torch.Tensor:
    """Returns the mean of the losses of these ranks' shares."""
    inputs, targets = (whole.chunk(hvd.size()) for whole in batch(step))
    losses = [loss_of(model, (inputs[rank], targets[rank])) for rank in ranks]
    return sum(losses, torch.zeros((), dtype=torch.float64)) / max(len(losses), 1)


@case(least=2)
def a_process_set() -> None:
    """The set's ranks train together; on the other ranks the optimizer is the plain one."""
    some = hvd.add_process_set(range(1, hvd.size()))
    ours, plain = network(seed=hvd.rank()), network(seed=1 if hvd.rank() else 0)
    optimizer = distributed(ours, process_set=some)
    optimizer.param_groups[0]["lr"] *= hvd.rank() or 1
    if some.included():
        hvd.broadcast_parameters(ours.state_dict(), root_rank=1, process_set=some)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1, process_set=some)
    train(ours, optimizer, own_loss)
    ranks = some.ranks if some.included() else [hvd.rank()]
    train(plain, sgd(plain), lambda model, step: loss_of_ranks(model, step, ranks))
    assert_alike(ours, plain)
    hvd.remove_process_set(some)


@case(least=2)
def optimizers_of_two_sets_at_once() -> None:
    """Even and odd ranks train one layer within their sets, and all ranks train the other layer together."""
    halves = [hvd.add_process_set(list(range(half, hvd.size(), 2))) for half in (0, 1)]
    own = halves[hvd.rank() % 2]
    ours, plain = network(), network()
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(ours[:2].parameters(), lr=0.1), process_set=own),
        hvd.DistributedOptimizer(torch.optim.SGD(ours[2:].parameters(), lr=0.1)),
    ]
    own_loss(ours, 0).backward()
    loss_of_ranks(plain, 0, own.ranks).backward()
    for one, other in zip(ours[:2].parameters(), plain[:2].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    plain.zero_grad()
    loss_of_ranks(plain, 0, list(range(hvd.size()))).backward()
    for one, other in zip(ours[2:].parameters(), plain[2:].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for optimizer in optimizers:
        optimizer.step()
    for half in halves:
        hvd.remove_process_set(half)


BATCHES = (3, 5, 0)  # per rank


@case(least=3, groups=[0, 1])
def ranks_that_run_out_of_data(groups: int) -> None:
    """A rank that has joined counts as zeros, in an average over all ranks."""
    ours, plain = network(), network()
    optimizer = distributed(ours, groups=groups)
    for step in range(BATCHES[hvd.rank()]):
        optimizer.zero_grad()
        own_loss(ours, step).backward()
        optimizer.step()
    last = hvd.join(device.ordinal(next(ours.parameters())))  # one of the ranks has had nothing to exchange
    assert last in range(hvd.size())
    hvd.broadcast_parameters(ours.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    alone = sgd(plain)
    for step in range(max(BATCHES)):
        active = [rank for rank in range(hvd.size()) if step < BATCHES[rank]]
        alone.zero_grad()
        (loss_of_ranks(plain, step, active) * len(active) / hvd.size()).backward()
        alone.step()
    assert_alike(ours, plain)
    train(ours, optimizer, own_loss, steps=2)  # all ranks are back
    assert_same_on_all_ranks(ours)


@case(least=3)
def a_sparse_table_of_ranks_that_run_out_of_data() -> None:
    table = nn.Embedding(12, 2, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Sum)
    for step in range(BATCHES[hvd.rank()]):
        optimizer.zero_grad()
        table(torch.tensor([hvd.rank() * 4, hvd.rank() * 4 + step % 4])).sum().backward()
        optimizer.step()
    hvd.join(device.ordinal(table.weight))
    hvd.broadcast_parameters(table.state_dict(), root_rank=1)
    expected = torch.zeros(12, 2)
    for rank, steps in enumerate(BATCHES):
        for step in range(steps):
            expected[rank * 4] -= 1
            expected[rank * 4 + step % 4] -= 1
    assert torch.equal(table.weight, expected)


def adasum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    product = (one * other).sum()
    return (1 - product / (2 * one.square().sum())) * one + (1 - product / (2 * other.square().sum())) * other


@case(kind=["SGD", "Adam"])
def steps_that_are_combined_by_adasum(kind: str) -> None:
    ours = network()
    optimizer = hvd.DistributedOptimizer(
        getattr(torch.optim, kind)(ours.parameters(), lr=0.01), ours.named_parameters(), op=hvd.Adasum
    )
    assert isinstance(optimizer, getattr(torch.optim, kind))
    alone = [copy.deepcopy(ours) for _ in range(hvd.size())]
    others = [getattr(torch.optim, kind)(model.parameters(), lr=0.01) for model in alone]
    for step in range(3):
        optimizer.zero_grad()
        own_loss(ours, step).backward()
        start = [one.detach().clone() for one in ours.parameters()]
        optimizer.step()
        assert_same_on_all_ranks(ours)
        changes: list[list[torch.Tensor]] = []
        for rank, (model, other) in enumerate(zip(alone, others, strict=True)):
            with torch.no_grad():
                for one, value in zip(model.parameters(), start, strict=True):
                    one.copy_(value)
            other.zero_grad()
            loss_of_ranks(model, step, [rank]).backward()
            other.step()
            changes.append(
                [one.detach() - value for one, value in zip(model.parameters(), start, strict=True)]
            )
        if hvd.size() <= 2:
            for place, one in enumerate(ours.parameters()):
                mine = [change[place] for change in changes]
                expected = start[place] + (mine[0] if hvd.size() == 1 else adasum(mine[0], mine[1]))
                torch.testing.assert_close(one.detach(), expected)


@case()
def what_an_optimizer_with_adasum_is() -> None:
    model = network()
    optimizer: Any = hvd.DistributedOptimizer(sgd(model), op=hvd.Adasum)
    with pytest.raises(ValueError, match="step"):
        optimizer.skip_synchronize()
    optimizer.synchronize()
    optimizer.set_backward_passes_per_step(2)
    with optimizer.no_sync():
        own_loss(model, 0).backward()
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
    with pytest.raises(ValueError, match="once"):
        hvd.DistributedOptimizer(optimizer)


@case(least=2)
def batch_normalisation_of_a_process_set() -> None:
    some = hvd.add_process_set(range(1, hvd.size()))
    ours, plain = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    ours = hvd.SyncBatchNorm.convert_sync_batchnorm(ours, some)
    copy.deepcopy(ours)
    parts = batch(0)[0].chunk(hvd.size())
    ranks = some.ranks if some.included() else [hvd.rank()]
    expected = plain(torch.cat([parts[rank] for rank in ranks]))
    rows = parts[0].shape[0]
    torch.testing.assert_close(ours(parts[hvd.rank()]), expected[ranks.index(hvd.rank()) * rows :][:rows])
    hvd.remove_process_set(some)
