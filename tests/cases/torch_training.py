"""Training on N ranks equals one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    OPTIMIZERS,
    as_compiled,
    assert_alike,
    assert_same_on_all_ranks,
    assert_trains_as_one_process,
    batch,
    distributed,
    fill,
    leaving_early,
    network,
    own_loss,
    sgd,
    share,
    train,
    whole_loss,
)
from sirtaki.torch.training.exchange import Overlap


@case(kind=OPTIMIZERS)
def as_one_process(kind: str) -> None:
    assert_trains_as_one_process(train, optimizer=lambda model: OPTIMIZERS[kind](model.parameters()))


@case()
def the_same_bits_in_every_run() -> None:
    runs = []
    for _ in range(2):
        model = network(width=300)
        train(model, distributed(model), own_loss, steps=4)
        runs.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@case()
def gradients_that_leave_early() -> None:
    """Megabytes of gradients are exchanged during the pass."""
    ours, reference = network(width=500), network(width=500)
    train(ours, leaving_early(distributed(ours)), own_loss, steps=3)
    train(reference, sgd(reference), whole_loss, steps=3)
    assert_alike(ours, reference)


@case(is_idle=[False, True])
def gradients_leave_early_where_the_pass_leaves_the_core(is_idle: bool) -> None:
    """Without a spare core they leave at the end, unless the previous pass has slept most of the time."""
    model = network(width=500)
    optimizer = distributed(model)
    reducer, submissions = optimizer._reducer, []
    ticks = count()

    def clocks() -> tuple[float, float]:
        now = float(next(ticks))
        return now, 0.0 if is_idle else now

    def submit(indices: list[int], submit: Any = reducer._exchange.submit) -> None:
        submissions.append(indices)
        submit(indices)

    reducer._overlap = Overlap(has_spare_core=False, clocks=clocks)
    reducer._exchange.submit = submit
    for step in range(3):
        submissions.clear()
        optimizer.zero_grad()
        own_loss(model, step).backward()
        leaves_early = is_idle and step > 0 and hvd.size() > 1
        assert (len(submissions) > 1) == leaves_early
        optimizer.step()
    assert_same_on_all_ranks(model)


@case()
def unequal_starts_become_equal() -> None:
    ours, reference = network(seed=hvd.rank()), network(seed=0)
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    train(ours, distributed(ours), own_loss)
    train(reference, sgd(reference), whole_loss)
    assert_alike(ours, reference)


class Branches(nn.Module):
    """A model whose rows go through `left` or `right`, as each row selects; `never` is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        fill(self.double())


def branched_loss(model: nn.Module, step: int, ranks: range) -> torch.Tensor:
    """Returns the mean loss over some ranks' rows; in a step each rank uses one branch for all its rows."""
    inputs, targets = batch(step)
    total = torch.zeros((), dtype=torch.float64)
    for rank in ranks:
        layer = model.left if (rank + step) % 2 == 0 else model.right
        rows = inputs.chunk(hvd.size())[rank]
        total = total + nn.functional.mse_loss(layer(rows), targets.chunk(hvd.size())[rank])
    return total / len(ranks)


def train_branches(ours: Branches, optimizer: Any) -> None:
    """Checks that training with the optimizer equals one process that trains on all ranks' rows."""

    def rows_of(ranks: range) -> Callable[[nn.Module, int], Tensor]:
        return lambda model, step: branched_loss(model, step, ranks)

    reference = Branches()
    train(ours, optimizer, rows_of(range(hvd.rank(), hvd.rank() + 1)), steps=6)
    train(reference, sgd(reference), rows_of(range(hvd.size())), steps=6)
    assert_alike(ours, reference)
    assert ours.never.weight.grad is None


@case()
def branches_that_differ_between_ranks() -> None:
    model = Branches()
    train_branches(model, distributed(model))


@case()
def branches_with_gradients_that_are_not_dropped() -> None:
    """A rank that does not use a parameter again contributes the gradient that it already has."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range) -> None:
        for step in range(4):
            if step % 2 == 0:
                optimizer.zero_grad(set_to_none=step == 0)
            branched_loss(model, step, ranks).backward()
            optimizer.step()

    ours, reference = Branches(), Branches()
    steps(ours, distributed(ours), range(hvd.rank(), hvd.rank() + 1))
    steps(reference, sgd(reference), range(hvd.size()))
    assert_alike(ours, reference)


@case(seed=[0, 1])
def clipped_gradients(seed: int) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor]) -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

    assert_trains_as_one_process(steps, lambda: network(seed))


@case(wrap=["before", "after"])
def a_learning_rate_schedule(wrap: str) -> None:
    def steps(model: nn.Module, optimizer, scheduler, loss) -> None:  # type: ignore[no-untyped-def]
        for step in range(4):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
            scheduler.step()

    ours, reference = network(), network()
    optimizer = sgd(ours)
    if wrap == "before":
        optimizer = distributed(ours, optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8)
    if wrap == "after":
        optimizer = distributed(ours, optimizer)
    steps(ours, optimizer, scheduler, own_loss)
    plain = sgd(reference)
    steps(reference, plain, torch.optim.lr_scheduler.OneCycleLR(plain, 0.2, total_steps=8), whole_loss)
    assert_alike(ours, reference)


@case(keyword=[False, True])
def closures(keyword: bool) -> None:
    def steps(model: nn.Module, optimizer: Any, loss: Callable[..., Tensor]) -> None:
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                value = loss(model, step)
                value.backward()
                return value

            returned = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            assert returned.requires_grad

    assert_trains_as_one_process(steps)


@case()
def memory_in_channels_last_order() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)).double()
        return fill(model).to(memory_format=torch.channels_last)

    def loss(model: nn.Module, step: int, own: bool) -> torch.Tensor:
        images = (
            batch(step, rows=12 * 3 * 16)[0].view(12, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        )
        return model(share(images) if own else images).square().mean()

    ours, reference = make(), make()
    train(ours, distributed(ours), lambda model, step: loss(model, step, True), steps=3)
    train(reference, sgd(reference), lambda model, step: loss(model, step, False), steps=3)
    assert_alike(ours, reference)


@case(backend=["eager", "aot_eager"])
def a_compiled_model(backend: str) -> None:
    ours, reference = network(), network()
    compiled = as_compiled(ours, backend=backend, fullgraph=True)
    train(ours, distributed(ours), lambda _, step: own_loss(compiled, step), steps=3)
    train(reference, sgd(reference), whole_loss, steps=3)
    assert_alike(ours, reference)


@case(name=["none", "fp16", "bf16"])
def compressed_gradients(name: str) -> None:
    """Whole numbers survive 16 bits exactly."""
    model = fill(nn.Linear(3, 2, bias=False))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), compression=getattr(hvd.Compression, name), op=hvd.Sum
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(hvd.rank() + 1))).sum().backward()
        expected = float(sum(range(1, hvd.size() + 1)))
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == torch.float32
        assert model.weight.grad.tolist() == [[expected] * 3] * 2
        optimizer.step()


@case(name=["fp16", "bf16"])
def compressed_gradients_that_some_ranks_lack(name: str) -> None:
    model = Branches().float()
    compression = getattr(hvd.Compression, name)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=compression, op=hvd.Sum
    )
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            model.left(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert model.left.bias.grad is not None, step
        assert model.left.bias.grad.tolist() == [1.0] * 3
        assert model.right.bias.grad is None


@case()
def division_before_the_average() -> None:
    assert_trains_as_one_process(train, gradient_predivide_factor=4.0)


@case()
def loss_scaling() -> None:
    """A gradient that overflows on one rank makes all ranks skip the step."""
    ours, reference = network(), network()
    optimizer = distributed(ours)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(4):
        optimizer.zero_grad()
        loss = own_loss(ours, step)
        if step == 2 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    plain = sgd(reference)
    for step in (0, 1, 3):
        plain.zero_grad()
        whole_loss(reference, step).backward()
        plain.step()
    assert_alike(ours, reference)


@case()
def mixed_precision() -> None:
    """Whole numbers survive bfloat16 exactly."""

    def steps(model: nn.Linear, wrap: Callable[[Any], Any], own: Callable[[Tensor], Tensor]) -> Tensor:
        nn.init.ones_(model.weight)
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            inputs = (torch.arange(12 * 4).view(12, 4) + step) % 5 - 2.0
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                result = model(own(inputs))
            assert result.dtype == torch.bfloat16
            scaler.scale(result.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return model.weight

    ours = steps(nn.Linear(4, 3, bias=False), lambda one: hvd.DistributedOptimizer(one, op=hvd.Sum), share)
    assert torch.equal(ours, steps(nn.Linear(4, 3, bias=False), lambda one: one, lambda whole: whole))


@case(groups=[1, 2, 100, "lists"])
def gradients_in_groups(groups: Any) -> None:
    """Ranks may use different parameters of a group, or none of it."""
    model = Branches()
    left, right, never = model.left, model.right, model.never
    if groups == "lists":
        groups = [[left.weight, right.bias], [left.bias, never.weight, never.bias]]
    train_branches(model, distributed(model, groups=groups, gradient_predivide_factor=2.0))


@case()
def groups_of_many_megabytes() -> None:
    """The groups' parts leave at different times of the pass."""
    ours, reference = network(width=500), network(width=500)
    groups = [[ours[0].weight, ours[4].bias], [ours[2].weight, ours[0].bias]]
    train(ours, leaving_early(distributed(ours, groups=groups)), own_loss, steps=3)
    train(reference, sgd(reference), whole_loss, steps=3)
    assert_alike(ours, reference)
