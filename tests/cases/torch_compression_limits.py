"""Compression with a memory where training is not plain: loss scales, infinities, unused parameters."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_compression import (
    METHODS,
    WIDTH,
    compression,
    loss_of_rank,
    simulate,
    simulated_step,
    simulation,
)
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    distributed,
    network,
    own_loss,
    sgd,
    train,
)

MATRIX = 2  # the number of the parameter that every method compresses


def compressing(name: str, start: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    model = network(width=WIDTH)
    return model, distributed(model, compression=compression(name, start), **options)


def residuals(optimizer: Any) -> dict[int, torch.Tensor]:
    return copy.deepcopy(optimizer.compression_state_dict()["residuals"])


def equal(one: dict[int, torch.Tensor], other: dict[int, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[at], other[at]) for at in one)


@case(least=2, name=METHODS)
def gradients_of_32_bits_have_the_same_bits_on_all_ranks(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = network(width=WIDTH).to(dtype)
        optimizer = distributed(model, compression=compression(name))
        train(model, optimizer, lambda one, step: own_loss(one.double(), step), steps=0)
        for step in range(5):
            optimizer.zero_grad()
            inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
            model(inputs.to(dtype)).float().square().mean().backward()
            optimizer.step()
        assert_same_on_all_ranks(model.float())
        assert all(one.dtype == torch.float32 for one in residuals(optimizer).values())


@case(least=2, name=METHODS)
def what_is_not_finite_is_seen_on_all_ranks(name: str) -> None:
    """Neither a compressed gradient nor an exact one with such a value changes what is left out."""
    for value in (float("inf"), float("nan")):
        for number in (MATRIX, MATRIX + 1):
            model, optimizer = compressing(name)
            train(model, optimizer, own_loss, steps=3)
            before = residuals(optimizer)
            assert before
            optimizer.zero_grad()
            own_loss(model, 3).backward()
            parameter = [*model.parameters()][number]
            optimizer.zero_grad()
            hook = parameter.register_hook(
                lambda gradient, value=value: (
                    gradient.clone().fill_(value) if hvd.rank() == hvd.size() - 1 else gradient
                )
            )
            before = residuals(optimizer)
            own_loss(model, 3).backward()
            hook.remove()
            assert not parameter.grad.isfinite().all()
            assert equal(before, residuals(optimizer))
            train(model, optimizer, own_loss, steps=1)
            assert all(one.isfinite().all() for one in model.parameters())
            assert not equal(before, residuals(optimizer))
            assert_same_on_all_ranks(model)


@case(least=2, name=METHODS)
def one_element_that_is_not_finite(name: str) -> None:
    model, optimizer = compressing(name)
    train(model, optimizer, own_loss, steps=2)
    parameter = [*model.parameters()][MATRIX]

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        poisoned = gradient.clone()
        if hvd.rank() == 0:
            poisoned[-1, -1] = float("-inf")
        return poisoned

    hook = parameter.register_hook(poison)
    optimizer.zero_grad()
    own_loss(model, 2).backward()
    hook.remove()
    assert not parameter.grad.isfinite().all()
    found = [bytes(one.grad.numpy().tobytes()) for one in model.parameters()]
    assert all(one == found for one in hvd.allgather_object(found))


@case(least=2, name=METHODS)
def residuals_follow_the_loss_scale(name: str) -> None:
    """A scale that grows every two steps, and an overflow that halves it, change nothing: to the bit."""
    model, optimizer = compressing(name)
    other, plain = compressing(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(9):
        overflows = step == 4
        for one, each, scales in ((model, optimizer, True), (other, plain, False)):
            each.zero_grad()
            loss = own_loss(one, step)
            if overflows and hvd.rank() == 0:
                loss = loss * float("inf")
            (scaler.scale(loss) if scales else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not overflows:
            plain.step()
    assert scaler.get_scale() != 2.0**10
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@case(least=2, name=METHODS)
def passes_that_add_up(name: str) -> None:
    held, counted, plain = (network(width=WIDTH) for _ in range(3))
    first = distributed(held, compression=compression(name))
    second = distributed(counted, compression=compression(name), backward_passes_per_step=2)
    alone, simulated, ranks = sgd(plain), simulation(name), hvd.size()
    for step in range(5):
        for model, optimizer in ((held, first), (counted, second)):
            optimizer.zero_grad()
            with optimizer.no_sync() if model is held else nullcontext():
                own_loss(model, 2 * step).backward()
            own_loss(model, 2 * step + 1).backward()
            optimizer.step()
        losses = [
            lambda rank=rank, step=step: (
                loss_of_rank(plain, 2 * step, rank, ranks) + loss_of_rank(plain, 2 * step + 1, rank, ranks)
            )
            for rank in range(ranks)
        ]
        simulated_step(plain, alone, simulated, losses, exact=step == 0)
    assert_alike(held, plain)
    assert_alike(counted, plain)


@case(least=2, name=METHODS)
def clipping_after_the_exchange(name: str) -> None:
    model, optimizer = compressing(name)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        own_loss(model, step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        optimizer.step()
    assert all(found == norms for found in hvd.allgather_object(norms))
    assert_same_on_all_ranks(model)


@case(least=2, name=METHODS)
def parameters_that_some_ranks_do_not_use(name: str) -> None:
    model, plain = network(width=WIDTH), network(width=WIDTH)
    unused = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.float64))
    named = [*model.named_parameters(), ("unused", unused)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([one for _, one in named], lr=0.05), named, compression=compression(name)
    )
    alone, simulated, ranks = torch.optim.SGD(plain.parameters(), lr=0.05), simulation(name), hvd.size()

    def loss(one: nn.Module, step: int, rank: int) -> torch.Tensor:
        weight = [*one.parameters()][MATRIX]
        if rank == 0:
            return loss_of_rank(one, step, rank, ranks)
        rest = [each for each in one.parameters() if each is not weight]
        return sum(each.square().sum() for each in rest)

    for step in range(5):
        optimizer.zero_grad()
        loss(model, step, hvd.rank()).backward()
        optimizer.step()
        losses = [
            lambda rank=rank, step=step: _with_zeros(plain, loss(plain, step, rank)) for rank in range(ranks)
        ]
        simulated_step(plain, alone, simulated, losses, exact=step == 0)
    assert unused.grad is None
    assert_alike(model, plain)


def _with_zeros(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Makes gradients of zeros for parameters that a loss does not use."""
    return loss + sum(0.0 * one.sum() for one in model.parameters())


@case(least=2, name=METHODS)
def steps_without_a_pass_and_gradients_set_by_hand(name: str) -> None:
    model, optimizer = compressing(name)
    train(model, optimizer, own_loss, steps=2)
    before, kept = residuals(optimizer), copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    optimizer.step()  # no rank has a gradient
    assert equal(before, residuals(optimizer))
    assert all(one.grad is None for one in model.parameters())
    assert all(torch.equal(one, kept[key]) for key, one in model.state_dict().items())
    if hvd.rank() == 0:
        for one in model.parameters():  # expanded: the result cannot be written to it
            one.grad = torch.ones((), dtype=one.dtype).expand(one.shape)
    optimizer.step()
    assert_same_on_all_ranks(model)
    assert [*model.parameters()][MATRIX].grad is not None


@case(least=2, name=METHODS)
def two_optimizers_whose_exchanges_end_in_any_order(name: str) -> None:
    models = [network(seed, WIDTH) for seed in (0, 1)]
    optimizers = [distributed(one, compression=compression(name)) for one in models]
    order = (0, 1) if hvd.rank() % 2 else (1, 0)
    for step in range(4):
        for one in optimizers:
            one.zero_grad()
        sum(own_loss(models[at], step) for at in order).backward()
        for at in order:
            optimizers[at].step()
    for seed, model in enumerate(models):
        plain = network(seed, WIDTH)
        simulate(plain, sgd(plain), simulation(name), range(4))
        assert_alike(model, plain)


@case(least=2, name=METHODS)
def ranks_that_join(name: str) -> None:
    """The number of exchanges is agreed again, and what is left out is kept."""
    model, optimizer = compressing(name, start=2)
    for step in range(3 + hvd.rank()):
        optimizer.zero_grad()
        own_loss(model, step).backward()
        optimizer.step()
    before = residuals(optimizer)
    hvd.join(model=model, optimizer=optimizer)
    assert equal(before, residuals(optimizer))
    numbers = hvd.allgather_object(optimizer.compression_state_dict()["exchanges"])
    assert numbers == [3 + rank for rank in range(hvd.size())]
    train(model, optimizer, own_loss, steps=1)
    assert optimizer.compression_state_dict()["exchanges"] == 3 + hvd.size()
    assert equal(before, residuals(optimizer))  # the first exchange after a join is exact
    train(model, optimizer, own_loss, steps=2)
    assert_same_on_all_ranks(model)


@case(least=3, name=METHODS)
def a_process_set_compresses_its_own_gradients(name: str) -> None:
    members = hvd.add_process_set([0, 2])
    model, plain = network(width=WIDTH), network(width=WIDTH)
    optimizer = distributed(model, compression=compression(name), process_set=members)
    if hvd.rank() in (0, 2):
        place = (0, 2).index(hvd.rank())
        for step in range(4):
            optimizer.zero_grad()
            loss_of_rank(model, step, place, 2).backward()
            optimizer.step()
        simulate(plain, sgd(plain), simulation(name, 2), range(4))
        assert_alike(model, plain)
    hvd.remove_process_set(members)


@case(least=2, name=METHODS)
def sums_and_predivided_averages(name: str) -> None:
    model, plain, third = (network(width=WIDTH) for _ in range(3))
    added = distributed(
        model, torch.optim.SGD(model.parameters(), lr=0.01), op=hvd.Sum, compression=compression(name)
    )
    divided = distributed(third, compression=compression(name), gradient_predivide_factor=4.0)
    train(model, added, own_loss, steps=4)
    train(third, divided, own_loss, steps=4)
    rate = 0.01 * hvd.size()
    simulate(plain, torch.optim.SGD(plain.parameters(), lr=rate), simulation(name), range(4))
    assert_alike(model, plain)
    plain = network(width=WIDTH)
    simulate(plain, sgd(plain), simulation(name), range(4))
    assert_alike(third, plain)


@case(least=2, name=METHODS)
def sparse_gradients_beside_compressed_ones(name: str) -> None:
    table = nn.Embedding(50, 8, sparse=True).double()
    nn.init.constant_(table.weight, 0.5)
    twin = copy.deepcopy(table)
    model, plain = network(width=WIDTH), network(width=WIDTH)
    named = [*model.named_parameters(), ("table", table.weight)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([one for _, one in named], lr=0.05), named, compression=compression(name)
    )
    alone = torch.optim.SGD([twin.weight], lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        alone.zero_grad()
        rows = torch.tensor([step, hvd.rank()])
        (own_loss(model, step) + table(rows).square().sum()).backward()
        optimizer.step()
        sum(
            twin(torch.tensor([step, rank])).square().sum() / hvd.size() for rank in range(hvd.size())
        ).backward()
        alone.step()
    torch.testing.assert_close(table.weight, twin.weight)
    simulate(plain, torch.optim.SGD(plain.parameters(), lr=0.05), simulation(name), range(4))
    assert_alike(model, plain)


@case(least=2, name=METHODS)
def state_of_each_rank(name: str) -> None:
    model, optimizer = compressing(name)
    train(model, optimizer, own_loss, steps=3)
    stored = copy.deepcopy(optimizer.compression_state_dict())
    mine = stored["residuals"][MATRIX]
    others = hvd.allgather_object(mine.numpy().tobytes())
    assert len(set(others)) == hvd.size()  # each rank has left out something else
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.check_parameters(optimizer)
    assert equal(stored["residuals"], residuals(optimizer))
    assert set(optimizer.state_dict()) == {"state", "param_groups"}

    second, again = compressing(name)
    again.load_compression_state_dict(stored)
    assert equal(stored["residuals"], residuals(again))
    second.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(second, again, own_loss, steps=1)  # the first exchange is exact
    assert again.compression_state_dict()["exchanges"] == 4
    again.load_compression_state_dict(stored)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    second.load_state_dict(model.state_dict())
    train(model, optimizer, own_loss, steps=2)
    train(second, again, own_loss, steps=2)
    for one, two in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
