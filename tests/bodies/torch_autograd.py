"""Derivatives: what is differentiated is the sum of the losses of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import sirtaki.torch as hvd
from bodies import case

Collective = Callable[[Tensor], Tensor]


class EveryRank(torch.autograd.Function):
    """A collective as one function of all ranks' inputs, so that it can be checked on each of them.

    Its output is all ranks' outputs; a rank runs its own part, and its derivative is all ranks' derivatives.
    """

    @staticmethod
    def forward(ctx: Any, collective: Collective, *inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            own = inputs[hvd.rank()].detach().requires_grad_()
            output = collective(own)
        ctx.own, ctx.output, ctx.shapes = own, output, [one.shape for one in inputs]
        ctx.counts = hvd.allgather(torch.tensor([output.numel()])).tolist()
        return hvd.allgather(output.detach().reshape(-1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        mine = gradient.split(ctx.counts)[hvd.rank()].reshape(ctx.output.shape)
        (own,) = torch.autograd.grad(ctx.output, ctx.own, mine, retain_graph=True)
        everyone = hvd.allgather(own.reshape(-1)).split([shape.numel() for shape in ctx.shapes])
        return None, *(one.reshape(shape) for one, shape in zip(everyone, ctx.shapes, strict=True))


def check(collective: Collective, shape: Callable[[int], tuple[int, ...]]) -> None:
    source = torch.Generator().manual_seed(3)
    inputs = [
        torch.randn(shape(rank), generator=source, dtype=torch.float64, requires_grad=True)
        for rank in range(hvd.size())
    ]
    assert gradcheck(lambda *all_of_them: EveryRank.apply(collective, *all_of_them), inputs)


COLLECTIVES: dict[str, tuple[Collective, Callable[[int], tuple[int, ...]]]] = {
    "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda _: (2, 3)),
    "average": (lambda x: hvd.allreduce(x), lambda _: (2, 3)),
    "scaled sum": (
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, name="scaled"),
        lambda _: (4,),
    ),
    "scalar": (lambda x: hvd.allreduce(x), lambda _: ()),
    "transposed": (lambda x: hvd.allreduce(x.t().square(), op=hvd.Sum).t(), lambda _: (2, 3)),
    "broadcast of the first": (lambda x: hvd.broadcast(x, 0), lambda _: (2, 2)),
    "broadcast of the last": (lambda x: hvd.broadcast(x, hvd.size() - 1, name="last"), lambda _: (2, 2)),
    "gather of equal parts": (lambda x: hvd.allgather(x), lambda _: (2, 2)),
    "gather of unequal parts": (lambda x: hvd.allgather(x, name="rows"), lambda rank: ((rank + 1) % 3, 2)),
    "a chain": (lambda x: hvd.allgather(hvd.allreduce(x.sin()) * hvd.broadcast(x, 0)), lambda _: (3,)),
}


@case(name=COLLECTIVES)
def derivatives_are_right(name: str) -> None:
    check(*COLLECTIVES[name])


@case()
def second_derivatives() -> None:
    """Of the sum over ranks of (sum of x^3)^2 / 2, by each rank's x."""
    mine = torch.arange(1.0, 4.0, dtype=torch.float64).add(hvd.rank()).requires_grad_()
    total = hvd.allreduce(mine.pow(3), op=hvd.Sum)
    (first,) = torch.autograd.grad(total.square().sum() / 2, mine, create_graph=True)
    torch.testing.assert_close(first, hvd.size() * total * 3 * mine.square())
    (second,) = torch.autograd.grad(first.sum(), mine)
    others = hvd.allreduce((3 * mine.square()).detach(), op=hvd.Sum)
    expected = hvd.size() * (others * 3 * mine.square() + total * 6 * mine)
    torch.testing.assert_close(second, expected.detach())


@case()
def a_gradient_that_is_expanded() -> None:
    mine = torch.ones(2, 3, requires_grad=True)
    hvd.allreduce(mine, op=hvd.Sum).sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == [[hvd.size()] * 3] * 2


@case(op=["Min", "Max", "Product"])
def operations_without_a_derivative(op: str) -> None:
    mine = torch.ones(3, requires_grad=True)
    result = hvd.allreduce(mine, op=getattr(hvd, op))
    with pytest.raises(ValueError, match=r"no derivative.*op=Sum"):
        result.sum().backward()


@case(name=["none", "fp16", "bf16"])
def through_compression(name: str) -> None:
    mine = torch.ones(3, requires_grad=True)
    hvd.allreduce(mine, op=hvd.Sum, compression=getattr(hvd.Compression, name)).sum().backward()
    assert mine.grad is not None
    assert mine.grad.dtype == torch.float32
    assert mine.grad.tolist() == [hvd.size()] * 3
