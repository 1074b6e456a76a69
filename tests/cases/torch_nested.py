"""Nested backward passes, as re-entrant checkpointing makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd
from cases import case
from cases.torch_failed_passes import Failing, boom
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    distributed,
    fill,
    leaving_early,
    own_loss,
    sgd,
    train,
    whole_loss,
)


class Checkpointed(nn.Module):
    """Blocks that are recomputed in nested backward passes; two of them use `shared`.

    In the backward pass of the last block, the large gradient of `shared` leaves before that of `scale`.
    """

    def __init__(self, is_nested: bool, head: bool, width: int = 4) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(4, width), nn.Linear(width, width)
        self.last, self.unused = nn.Linear(width, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(width))
        self.is_nested, self.head = is_nested, head
        fill(self.double())

    def run(self, layer: Any, inputs: Tensor) -> Tensor:
        return checkpoint(layer, inputs, use_reentrant=True) if self.is_nested else layer(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.run(lambda x: self.first(x).tanh(), inputs.clone().requires_grad_())
        hidden = self.run(lambda x: self.shared(x).tanh(), hidden)
        hidden = self.run(lambda x: self.shared(x * self.scale).tanh(), hidden)
        return self.last(hidden) if self.head else self.run(self.last, hidden)


@case(head=[False, True])
def nested_passes(head: bool) -> None:
    ours, plain = Checkpointed(True, head), Checkpointed(False, head)
    optimizer = distributed(ours)
    for step in range(3):
        optimizer.zero_grad()
        own_loss(ours, step).backward()
        mine = ours.shared.weight.grad.clone()
        nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        optimizer.step()
        everyone = hvd.allgather(mine.unsqueeze(0))
        assert all(torch.equal(one, mine) for one in everyone)  # reduced before backward() returned
    assert ours.unused.weight.grad is None
    clipped = sgd(plain)
    for step in range(3):
        clipped.zero_grad()
        whole_loss(plain, step).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        clipped.step()
    assert_alike(ours, plain)


@case()
def nested_passes_and_a_sum() -> None:
    """No gradient leaves before a pass has ended, though enough bytes are ready."""
    ours, plain = (Checkpointed(is_nested, head=True, width=500) for is_nested in (True, False))
    optimizer = leaving_early(distributed(ours, op=hvd.Sum))
    train(ours, optimizer, lambda model, step: own_loss(model, step) / hvd.size(), steps=4)
    assert_alike(ours, train(plain, sgd(plain), whole_loss, steps=4))


@case(head=[False, True])
def nested_passes_from_some_step_on(head: bool) -> None:
    """The first nested pass may add to a gradient that has left, on all ranks, on some, or on none."""
    plain = Checkpointed(False, head, width=500)
    train(plain, sgd(plain), whole_loss, steps=4)
    for is_early in (True, False, hvd.rank() % 2 == 0, hvd.rank() % 2 == 1):
        ours = Checkpointed(False, head, width=500)
        optimizer = leaving_early(distributed(ours), is_early)
        for step in range(4):
            ours.is_nested = step >= 2
            optimizer.zero_grad()
            own_loss(ours, step).backward()
            optimizer.step()
        assert_alike(ours, plain)


@case()
def a_nested_pass_from_some_step_on_that_raises() -> None:
    """A rank that has ended a round within its pass takes part in the next round, also if the pass raises."""
    plain = Checkpointed(False, head=True, width=500)
    train(plain, sgd(plain), whole_loss, steps=3)
    ours = Checkpointed(False, head=True, width=500)
    optimizer = leaving_early(distributed(ours), is_early=hvd.rank() == 0)
    train(ours, optimizer, own_loss, steps=2)
    ours.is_nested = True
    optimizer.zero_grad()
    with pytest.raises(ArithmeticError):
        own_loss(lambda inputs: ours(Failing.apply(inputs.clone().requires_grad_(), boom)), 2).backward()
    optimizer.zero_grad()
    own_loss(ours, 2).backward()
    optimizer.step()
    assert_alike(ours, plain)


@case()
def nested_passes_with_branches_that_differ() -> None:
    """No rank waits inside a nested pass for a gradient that another rank never has."""
    model = Checkpointed(True, head=False)
    optimizer = distributed(model)
    for step in range(4):
        optimizer.zero_grad()
        layer = model.first if (hvd.rank() + step) % 2 else model.shared
        inputs = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        checkpoint(
            model.last, checkpoint(layer, inputs, use_reentrant=True), use_reentrant=True
        ).sum().backward()
        optimizer.step()
    assert_same_on_all_ranks(model)
