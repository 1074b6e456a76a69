"""Backward passes that raise: on all ranks, on one, held back, given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    batch,
    distributed,
    fill,
    leaving_early,
    loss_of,
    network,
    own_loss,
    sgd,
    train,
    whole_loss,
)
from cases.torch_passes import expect_two_passes_a_step


class Failing(torch.autograd.Function):
    """A function with a backward pass that fails."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, fail: Callable[[], object]) -> Tensor:
        ctx.fail = fail
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.fail()


def layers(width: int) -> Any:
    """Returns a network of which a large gradient has left when a pass of `failing` fails, if it is wide."""
    return fill(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *network(width=width)).double())


def boom() -> None:
    raise ArithmeticError("boom")


def failing(model: nn.Sequential, fail: Callable[[], object] = boom) -> Callable[[Tensor], Tensor]:
    """Returns the model with a backward pass that fails before the first layer, when all others are done."""
    return lambda inputs: model[2:](Failing.apply(model[:2](inputs), fail))


def fails_here(model: nn.Sequential, step: int) -> bool:
    """Runs a backward pass, which raises on the last rank in step 2. Returns whether this one has raised."""
    if step != 2 or hvd.rank() != hvd.size() - 1:
        own_loss(model, step).backward()
        return False
    with pytest.raises(ArithmeticError):
        failing_loss(model, step).backward()
    return True


def failing_loss(model: nn.Sequential, step: int) -> Tensor:
    return own_loss(failing(model), step)


@case(width=[5, 600])
def a_pass_that_raises_on_all_ranks(width: int) -> None:
    """The pass may have begun to send: a round is then open."""
    model, plain = layers(width), layers(width)
    optimizer = leaving_early(distributed(model))
    for step in range(4):
        if step != 3:
            optimizer.zero_grad()
        if step in (1, 2):
            with pytest.raises(ArithmeticError, match="boom"):
                failing_loss(model, step).backward()
            if step == 2:
                nn.Module.zero_grad(model)  # the optimizer does not see this
            continue
        own_loss(model, step).backward()
        optimizer.step()
    optimizer = sgd(plain)
    for step in (0, 3):
        train(plain, optimizer, lambda model, _, step=step: whole_loss(model, step), steps=1)
    assert_alike(model, plain)


def past_a_failure(width: int, after_pass: Callable[[Any, bool], object]) -> tuple[nn.Sequential, Any]:
    """Returns a model and its optimizer after four passes, one of which has raised on one rank.

    Calls `after_pass` after each, with the optimizer and whether the pass has raised.
    """
    model = layers(width)
    optimizer = leaving_early(distributed(model))
    for step in range(4):
        optimizer.zero_grad()
        after_pass(optimizer, fails_here(model, step))
    return model, optimizer


@case(width=[5, 600])
def a_pass_that_raises_on_one_rank(width: int) -> None:
    """That rank takes part in the round with the gradients that it has, and then steps like the others."""
    model, _ = past_a_failure(width, lambda optimizer, _: optimizer.step())
    assert_same_on_all_ranks(model)


@case(width=[5, 600])
def a_pass_that_raises_on_one_rank_and_is_given_up(width: int) -> None:
    # The others wait for the part of the round of the rank that clears its gradients.
    model, optimizer = past_a_failure(width, lambda one, has_raised: has_raised and one.zero_grad())
    own_loss(model, 9).backward()
    del optimizer  # without it, nothing would have been exchanged
    gradients = hvd.allgather_object([parameter.grad.numpy().tobytes() for parameter in model.parameters()])
    assert len({tuple(one) for one in gradients[:-1]}) <= 1


@case(least=2)
def a_pass_after_one_that_raised_adds_to_gradients_that_are_reduced() -> None:
    """Its first gradient does not grow while the open round is still being exchanged."""
    model, plain = layers(600), layers(600)
    optimizer = leaving_early(distributed(model))
    own_loss(model, 0).backward()
    optimizer.zero_grad()
    if hvd.rank() == 1:
        time.sleep(0.2)  # the others wait for this rank's part of the round
    with pytest.raises(ArithmeticError):
        failing_loss(model, 1).backward()
    found: list[Tensor] = []
    last = list(model[-1].parameters())
    hooks = [one.register_hook(lambda _, one=one: found.append(one.grad.clone())) for one in last]
    own_loss(model, 2).backward()
    for hook in hooks:
        hook.remove()
    for mine in found:
        assert all(torch.equal(one, mine) for one in hvd.allgather(mine.unsqueeze(0)))
    with pytest.raises(ArithmeticError):
        loss_of(failing(plain), batch(1)).backward()
    whole_loss(plain, 2).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert not any(one._backward_hooks for one in model.parameters())


@case(least=2)
def a_held_pass_that_raises_starts_no_round() -> None:
    """Its gradients would have stayed on this rank, so the others do not wait for them."""

    def fail(model: nn.Module) -> None:
        if hvd.rank() == 0:
            with pytest.raises(ArithmeticError):
                failing_loss(model, 5).backward()

    expect_two_passes_a_step(fail)
