"""Pairs of equal trainings, with and without overlap_forward, and their comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cases.torch_models import OPTIMIZERS, assert_same_on_all_ranks, distributed, network, own_loss
from sirtaki.torch.training.overlapped import flight
from sirtaki.torch.training.overlapped.flight import ParameterInFlight

Step = Callable[[nn.Module, Any, int], None]


def in_flight(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_parameters() if type(one) is ParameterInFlight]


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one.detach(), two.detach()), name


def both(
    make: Callable[..., torch.optim.Optimizer] = OPTIMIZERS["Adam"],
    build: Callable[[], nn.Module] = network,
    has_compiled: Callable[[], bool] = lambda: False,
    **options: Any,
) -> list[tuple[nn.Module, Any]]:
    """Returns two equal models with their optimizers: with overlap_forward, and without."""
    flight.has_compiled = has_compiled  # other cases of this process compile models
    pairs = []
    for overlap in (True, False):
        model = build()
        pairs.append(
            (model, distributed(model, make(model.parameters()), overlap_forward=overlap, **options))
        )
    return pairs


def alike(pairs: list[tuple[nn.Module, Any]], step: Step, steps: int = 6) -> None:
    """Takes the same steps with both, and compares."""
    for number in range(steps):
        for model, optimizer in pairs:
            step(model, optimizer, number)
    assert_equal(pairs[0][0], pairs[1][0])
    assert_same_on_all_ranks(pairs[0][0])


def plain_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    own_loss(model, step).backward()
    optimizer.step()
