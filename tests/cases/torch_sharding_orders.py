"""Optimizers with shard= whose parameters get another order of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import distributed, fill, generator
from cases.torch_sharding_models import OPTIMIZERS, SHARDS, assert_equal, assert_states_equal
from sirtaki.bindings.errors import MismatchError


def images() -> nn.Module:
    """Returns a model with a parameter that is cut among ranks and changes its order, and small ones."""
    return fill(nn.Sequential(nn.Conv2d(8, 16, 3), nn.Tanh(), nn.Conv2d(16, 1, 1)).double())


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(2, 8, 5, 5, generator=generator(100 * hvd.rank() + number), dtype=torch.float64)
    model(inputs).square().mean().backward()
    optimizer.step()


def trained(shard: str | None, at_conversion: Callable[[nn.Module, Any], None]) -> tuple[nn.Module, Any]:
    """Trains 6 steps, with a conversion before steps 0, 2 and 4."""
    model = images()
    optimizer = distributed(model, OPTIMIZERS["Adam"](model.parameters()), shard=shard)
    for number in range(6):
        if number % 2 == 0:
            optimizer.zero_grad()
            is_last = number == 2
            model.to(memory_format=torch.contiguous_format if is_last else torch.channels_last)
            at_conversion(model, optimizer)
        step(model, optimizer, number)
    return model, hvd.full_state_dict(optimizer)


def nothing(model: nn.Module, optimizer: Any) -> None:
    """Leaves it to the next step to divide the state again."""


def load_what_is_saved(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(hvd.full_state_dict(optimizer)))


@case()
def the_state_follows_another_order_of_memory() -> None:
    plain, expected = trained(None, nothing)
    for shard in SHARDS:
        for at_conversion in (nothing, load_what_is_saved):
            model, state = trained(shard, at_conversion)
            assert_equal(model, plain)
            for number, values in expected["state"].items():
                for key, value in values.items():
                    assert torch.equal(state["state"][number][key], value), f"{key} of parameter {number}"


@case()
def the_whole_state_is_right_before_the_next_step() -> None:
    for shard in SHARDS:
        model = images()
        optimizer = distributed(model, OPTIMIZERS["Adam"](model.parameters()), shard=shard)
        step(model, optimizer, 0)
        optimizer.zero_grad()
        before: dict[str, Any] = copy.deepcopy(hvd.full_state_dict(optimizer))
        model.to(memory_format=torch.channels_last)
        after = hvd.full_state_dict(optimizer)
        for number, values in before["state"].items():
            for key, value in values.items():
                assert torch.equal(after["state"][number][key], value), f"{key} of parameter {number}"
        model.to(memory_format=torch.contiguous_format)
        assert_states_equal(hvd.full_state_dict(optimizer), before)


@case(least=2)
def ranks_with_different_orders_of_memory_are_refused() -> None:
    """Their slices would have other elements."""
    for shard in SHARDS:
        model = images()
        if hvd.rank() == 1:
            model.to(memory_format=torch.channels_last)
        optimizer = distributed(model, OPTIMIZERS["Adam"](model.parameters()), shard=shard)
        with pytest.raises(MismatchError, match=r"'.*0\.weight.*row-major .* same order of dimensions"):
            step(model, optimizer, 0)
        hvd.barrier()


@case(least=2)
def divided_gradients_do_not_follow() -> None:
    model = images()
    optimizer = distributed(model, OPTIMIZERS["Adam"](model.parameters()), shard="gradients")
    model(torch.ones(1, 8, 5, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match=r"call optimizer\.zero_grad\(\) first"):
        model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        weight: Tensor = model[0].weight
        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"shape \[16, 8, 3, 3\] has changed since .* optimizer\.zero_grad"):
        optimizer.step()
    hvd.barrier()
