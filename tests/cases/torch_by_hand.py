"""Programs that write gradients, or the parameters of an optimizer, by hand."""

from __future__ import annotations

import torch
from torch import nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    assert_alike,
    distributed,
    network,
    own_loss,
    sgd,
    whole_loss,
)

@case(op=["Average", "Sum"])
def gradients_that_are_written_into_the_same_memory(op: str) -> None:
    """They are exchanged in each step, also if `zero_grad()` is never called."""
    factor = hvd.size() if op == "Sum" else 1
    model, plain = network(), network()
    optimizer, reference = distributed(model, op=getattr(hvd, op)), sgd(plain)
    for one in (*model.parameters(), *plain.parameters()):
        one.grad = torch.zeros_like(one)
    for step in range(3):
        for found, loss, scale in ((model, own_loss, 1), (plain, whole_loss, factor)):
            made = torch.autograd.grad(scale * loss(found, step), list(found.parameters()))
            with torch.no_grad():
                for one, gradient in zip(found.parameters(), made, strict=True):
                    one.grad.copy_(gradient)
        optimizer.step()
        reference.step()
    assert_alike(model, plain)


@case()
def a_step_that_repeats_the_last_one() -> None:
    """Gradients that were clipped for a step are those of all ranks, and are not summed again."""
    model, plain = network(), network()
    optimizer, reference = distributed(model, op=hvd.Sum), sgd(plain)
    for one, each, loss in ((model, optimizer, own_loss), (plain, reference, whole_loss)):
        ((hvd.size() if one is plain else 1) * loss(one, 0)).backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.05)
        each.step()
        each.step()
        for parameter in one.parameters():
            parameter.grad = None
        each.step()
        assert all(parameter.grad is None for parameter in one.parameters())
    assert_alike(model, plain)
