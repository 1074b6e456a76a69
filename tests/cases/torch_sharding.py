"""Optimizers with shard=: the bits of the optimizer without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    distributed,
    fill,
    generator,
    leaving_early,
    network,
    own_loss,
    train,
    whole_loss,
)
from cases.torch_sharding_models import (
    OPTIMIZERS,
    SHARDS,
    WHOLE,
    WIDTH,
    assert_equal,
    assert_same_bits,
    assert_states_equal,
    both,
    wide_network,
)


@case(name=OPTIMIZERS)
def state_is_divided_without_a_difference(name: str) -> None:
    (model, optimizer), (other, plain) = both("state", OPTIMIZERS[name])
    train(model, optimizer, own_loss)
    train(other, plain, own_loss)
    assert_equal(model, other)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@case(name=OPTIMIZERS)
def gradients_are_divided_without_a_difference(name: str) -> None:
    (model, optimizer), (other, plain) = both("gradients", OPTIMIZERS[name])
    train(model, optimizer, own_loss)
    train(other, plain, own_loss)
    assert_equal(model, other)
    assert_same_on_all_ranks(model)


@case(name=["momentum", "AdamW"])
def it_computes_what_one_process_computes(name: str) -> None:
    for shard in SHARDS:
        (model, optimizer), _ = both(shard, OPTIMIZERS[name])
        alone = network(width=WIDTH)
        train(model, optimizer, own_loss)
        train(alone, OPTIMIZERS[name](alone.parameters()), whole_loss)
        assert_alike(model, alone)


@case(dtype=["float32", "bfloat16"])
def other_dtypes(dtype: str) -> None:
    def loss(net: nn.Module, step: int) -> Tensor:
        return own_loss(lambda one: net(one.to(next(net.parameters()).dtype)).double(), step)

    def run(net: nn.Module, shard: str | None) -> None:
        train(net, distributed(net, OPTIMIZERS["Adam"](net.parameters()), shard=shard), loss)

    assert_same_bits(run, lambda: wide_network().to(getattr(torch, dtype)))


@case(name=WHOLE)
def whole_parameters_belong_to_one_rank(name: str) -> None:
    def make(given: Any) -> torch.optim.Optimizer:
        matrices = [one for one in given if one.dim() == 2]
        return getattr(torch.optim, name)(matrices, lr=0.01)

    models = [network(width=WIDTH) for _ in range(2)]
    optimizers = [
        hvd.DistributedOptimizer(make(one.parameters()), shard=how)
        for one, how in zip(models, ("state", None), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, own_loss)
    assert_equal(*models)
    loaded = network(width=WIDTH)
    again = make(loaded.parameters())
    again.load_state_dict(hvd.full_state_dict(optimizers[0]))
    assert_states_equal(again.state_dict(), optimizers[1].state_dict())
    if hvd.size() > 1:
        with pytest.raises(ValueError, match='use shard="state"'):
            hvd.DistributedOptimizer(make(network().parameters()), shard="gradients")


@case()
def groups_and_schedulers_are_those_of_the_program() -> None:
    def run(net: nn.Sequential, shard: str | None) -> list[float]:
        groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": list(net[2:].parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        optimizer = distributed(net, optimizer, shard=shard)
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(5):
            train(net, optimizer, own_loss, steps=1)
            before.step()
            after.step()
            optimizer.param_groups[1]["weight_decay"] = 0.1 * step
        assert optimizer.param_groups[0]["params"][0] is net[0].weight
        return [group["lr"] for group in optimizer.param_groups]

    assert_same_bits(run)


@case()
def parameters_may_be_added() -> None:
    def run(net: nn.Sequential, shard: str | None) -> None:
        optimizer = torch.optim.Adam(net[2:].parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(optimizer, shard=shard)
        train(net, optimizer, own_loss, steps=2)
        optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 0.05})
        train(net, optimizer, own_loss, steps=3)

    assert_same_bits(run)


@case()
def closures() -> None:
    def run(net: nn.Module, shard: str | None) -> list[float]:
        optimizer = distributed(net, OPTIMIZERS["Adam"](net.parameters()), shard=shard)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = own_loss(net, 0)
            loss.backward()
            return loss

        return [float(optimizer.step(closure).detach()) for _ in range(3)]

    assert_same_bits(run)


@case()
def several_passes_before_a_step() -> None:
    def steps(net: nn.Module, optimizer: Any, held_back: bool) -> None:
        for step in range(3):
            optimizer.zero_grad()
            if held_back:
                with optimizer.no_sync():
                    own_loss(net, step).backward()
            else:
                own_loss(net, step).backward()
            own_loss(net, step + 10).backward()
            optimizer.step()

    for shard in SHARDS:
        (model, optimizer), (other, plain) = both(shard, OPTIMIZERS["momentum"])
        for held_back in (True, False, True):
            steps(model, optimizer, held_back)
            steps(other, plain, held_back)
            if held_back and shard == "state":
                assert_equal(model, other)
            assert_alike(model, other)
        for one in (optimizer, plain):
            one.set_backward_passes_per_step(2)
        steps(model, optimizer, False)
        steps(other, plain, False)
        assert_alike(model, other)
        assert_same_on_all_ranks(model)


@case()
def passes_that_are_not_followed_by_a_step() -> None:
    """Drops gradients in each way that a program may, so that none may return in a later step."""

    def run(net: nn.Module, shard: str | None) -> None:
        one = distributed(net, OPTIMIZERS["momentum"](net.parameters()), shard=shard)
        own_loss(net, 0).backward()
        net.zero_grad()
        own_loss(net, 1).backward()
        one.step()
        one.zero_grad(set_to_none=False)
        own_loss(net, 2).backward()
        one.step()
        net.zero_grad(set_to_none=False)
        one.step()
        with one.no_sync():
            own_loss(net, 3).backward()
        one.zero_grad()
        one.step()
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (hvd.rank() + 1))
        one.step()
        one.step()

    assert_same_bits(run)


@case()
def parameters_that_some_ranks_or_none_use() -> None:
    def loss(net: nn.Module, step: int) -> Tensor:
        if step % 2 and hvd.rank() == 0:  # the last layer is not used here
            return net[:3](torch.ones(2, 4, dtype=torch.float64)).square().mean()
        return own_loss(net, step)

    def run(net: Any, shard: str | None) -> None:
        net.unused = nn.Parameter(torch.ones(100, dtype=torch.float64))
        net[2].weight.requires_grad_(False)
        optimizer = distributed(net, OPTIMIZERS["AdamW"](net.parameters()), shard=shard)
        layers = net[:]
        train(layers, optimizer, loss)
        assert net.unused.grad is None
        net[2].weight.requires_grad_(True)
        train(layers, optimizer, loss)
        assert torch.equal(net.unused, torch.ones(100, dtype=torch.float64))

    assert_same_bits(run)


@case()
def memory_formats_and_shapes() -> None:
    """Parameters that are transposed, without dimensions, without elements, and replaced later."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            source = generator(0)
            self.turned = nn.Parameter(torch.randn(20, 30, generator=source).t())
            self.image = nn.Parameter(
                torch.randn(4, 3, 5, 5, generator=source).to(memory_format=torch.channels_last)
            )
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.none = nn.Parameter(torch.zeros(0, 3))

        def forward(self, step: int) -> Tensor:
            factor = 1.0 + step + hvd.rank()
            return (self.turned * factor).sin().sum() + self.image.cos().sum() * self.scalar + self.none.sum()

    for shard in SHARDS:
        nets, states = [Net(), Net()], []
        for net, how in zip(nets, (shard, None), strict=True):
            optimizer = distributed(net, torch.optim.Adam(net.parameters(), lr=0.1), shard=how)
            train(net, optimizer, lambda one, step: one(step), steps=3)
            net.turned.data = net.turned.data.clone()
            train(net, optimizer, lambda one, step: one(step), steps=3)
            states.append(hvd.full_state_dict(optimizer))
        assert_equal(*nets)
        assert_states_equal(*states)


@case(options=["fp16", "Sum", "predivide", "groups"])
def other_options(options: str) -> None:
    given: dict[str, Any] = {
        "fp16": {"compression": hvd.Compression.fp16},
        "Sum": {"op": hvd.Sum},
        "predivide": {"gradient_predivide_factor": 4.0},
        "groups": {"groups": 2},
    }[options]

    def run(net: nn.Module, shard: str | None) -> None:
        train(net, distributed(net, OPTIMIZERS["momentum"](net.parameters()), shard=shard, **given), own_loss)

    if options == "groups":
        with pytest.raises(ValueError, match="groups have no meaning"):
            distributed(network(), shard="gradients", **given)
    assert_same_bits(run, shards=("state",) if options == "groups" else SHARDS)


@case(least=3)
def a_process_set() -> None:
    members = hvd.add_process_set([0, 2])

    def run(net: nn.Module, shard: str | None) -> None:
        optimizer = OPTIMIZERS["Adam"](net.parameters())
        optimizer = distributed(net, optimizer, shard=shard, process_set=members)
        train(net, optimizer, own_loss)
        if shard is None:
            (expected,) = {len(one) for one in hvd.allgather_object(optimizer.state)} - {0}
            assert expected == len(list(net.parameters()))

    assert_same_bits(run)
    hvd.remove_process_set(members)


@case()
def checkpoints_inside_a_pass() -> None:
    """Runs the middle of the network again in the backward pass, in passes of their own."""

    def loss(net: nn.Module, step: int) -> Tensor:
        return own_loss(lambda given: net[4](checkpoint(net[1:4], net[0](given), use_reentrant=True)), step)

    for shard in SHARDS:
        (model, optimizer), (other, plain) = both(shard, OPTIMIZERS["momentum"])
        train(model, leaving_early(optimizer) if hvd.size() > 1 else optimizer, loss)
        train(other, leaving_early(plain) if hvd.size() > 1 else plain, loss)
        assert_alike(model, other)
        assert_same_on_all_ranks(model)


@case(least=2)
def gradients_are_divided_during_the_pass() -> None:
    """Layers of 2 MB each, so that gradients leave before the pass has ended."""

    def build() -> nn.Module:
        return fill(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).double())

    def loss(net: nn.Module, step: int) -> Tensor:
        source = generator(step * 10 + hvd.rank())
        return net(torch.randn(3, 512, generator=source, dtype=torch.float64)).square().mean()

    def run(net: nn.Module, shard: str | None) -> None:
        optimizer = distributed(net, OPTIMIZERS["momentum"](net.parameters()), shard=shard)
        train(net, leaving_early(optimizer), loss, steps=3)

    assert_same_bits(run, build)
