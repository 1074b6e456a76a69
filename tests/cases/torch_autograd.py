"""Derivatives: the differentiated function is the sum of the losses of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import sirtaki.torch as hvd
from cases import case

Collective = Callable[[Tensor], Tensor]


class EveryRank(torch.autograd.Function):
    """A collective as one function of all ranks' inputs, so that it can be checked on each rank.

    Its output is all ranks' outputs; a rank computes its own part, and its derivative is all ranks'
    derivatives.
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
    "minimum": (lambda x: hvd.allreduce(x, op=hvd.Min), lambda _: (2, 3)),
    "maximum": (lambda x: hvd.allreduce(x, op=hvd.Max, name="most"), lambda _: (2, 3)),
    "product": (lambda x: hvd.allreduce(x, op=hvd.Product), lambda _: (2, 3)),
    "product with zeros": (lambda x: hvd.allreduce(x * (x > 0), op=hvd.Product), lambda _: (5,)),
    "group": (
        lambda x: torch.cat(hvd.grouped_allreduce([x[:1].sin(), x[1:]], op=hvd.Sum, name="both")),
        lambda _: (3, 2),
    ),
    "group of products": (
        lambda x: torch.cat(hvd.grouped_allreduce([x[:1], x[1:]], op=hvd.Product)),
        lambda _: (3, 2),
    ),
    "scatter of a sum": (lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5), lambda _: (5, 2)),
    "scatter of an average": (
        lambda x: hvd.reducescatter(x, name="mean", postscale_factor=3.0),
        lambda _: (4,),
    ),
    "scatter of a maximum": (lambda x: hvd.reducescatter(x, op=hvd.Max), lambda _: (5, 2)),
    "scatter of a group": (
        lambda x: torch.cat(hvd.grouped_reducescatter([x, x[1:].cos()], op=hvd.Sum)),
        lambda _: (4, 2),
    ),
    "gather of a group": (
        lambda x: torch.cat(hvd.grouped_allgather([x, x[1:].cos()])),
        lambda rank: (rank + 1, 2),
    ),
    "exchange of equal parts": (lambda x: hvd.alltoall(x), lambda _: (2 * hvd.size(), 2)),
    "exchange of unequal parts": (
        lambda x: hvd.alltoall(x, splits=[rank % 2 for rank in range(hvd.size())], name="some")[0],
        lambda rank: (hvd.size() + rank, 2),
    ),
    "a chain": (lambda x: hvd.allgather(hvd.allreduce(x.sin()) * hvd.broadcast(x, 0)), lambda _: (3,)),
}


@case(name=COLLECTIVES)
def derivatives_are_right(name: str) -> None:
    check(*COLLECTIVES[name])


@case()
def second_derivatives() -> None:
    """Differentiates the sum over ranks of (sum of x^3)^2 / 2, by each rank's x."""
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


@case()
def second_derivatives_of_a_product() -> None:
    """Differentiates the product over ranks, with a zero on the first rank."""
    mine = torch.full((2,), float(hvd.rank()), dtype=torch.float64, requires_grad=True)
    product = hvd.allreduce(mine, op=hvd.Product)
    (first,) = torch.autograd.grad(product.sum(), mine, create_graph=True)
    factors = torch.arange(1.0, hvd.size()).prod() if hvd.rank() == 0 else torch.zeros(())
    assert torch.equal(first.detach(), torch.full((2,), hvd.size() * float(factors), dtype=torch.float64))
    if hvd.size() == 2:
        (second,) = torch.autograd.grad(first.sum(), mine)
        assert second.tolist() == [2.0, 2.0]


@case(op=["Min", "Max"])
def extremes_that_several_ranks_have(op: str) -> None:
    """The ranks share the gradient equally, as the elements of one tensor do."""
    mine = torch.tensor([1.0, float(hvd.rank() % 2), float("nan")], requires_grad=True)
    hvd.allreduce(mine, op=getattr(hvd, op)).sum().backward()
    everyone = torch.tensor([[1.0, rank % 2, float("nan")] for rank in range(hvd.size())], requires_grad=True)
    (everyone.amin(0) if op == "Min" else everyone.amax(0))[:2].sum().backward()
    assert everyone.grad is not None
    expected = everyone.grad[hvd.rank(), :2] * hvd.size()
    torch.testing.assert_close(mine.grad[:2], expected)
    assert mine.grad[2] == 1.0


@case()
def operations_without_a_derivative() -> None:
    for options in ({"op": hvd.Adasum}, {"op": hvd.Max, "prescale_factor": 2.0}):
        mine = torch.ones(3, requires_grad=True)
        result = hvd.allreduce(mine, **options)
        with pytest.raises(ValueError, match=r"no derivative.*op=Sum"):
            result.sum().backward()


@case(least=2)
def derivatives_over_process_sets() -> None:
    """The set has all ranks but the first; its root is its last rank."""
    some = hvd.add_process_set(range(1, hvd.size()))
    if hvd.rank() > 0:
        mine = torch.full((2,), float(hvd.rank()), requires_grad=True)
        results = (
            hvd.allreduce(mine, process_set=some) * 2,
            hvd.allreduce(mine, op=hvd.Max, process_set=some) * 3,
            hvd.allgather(mine, process_set=some).sum() * 5,
            hvd.broadcast(mine, hvd.size() - 1, process_set=some) * 7,
            hvd.reducescatter(mine.repeat(hvd.size() - 1), op=hvd.Sum, process_set=some) * 11,
            hvd.alltoall(mine.repeat(hvd.size() - 1), process_set=some).sum() * 13,
        )
        sum(result.sum() for result in results).backward()
        count = hvd.size() - 1
        is_last = hvd.rank() == count
        expected = 2 + 3 * count * is_last + 5 * count + 7 * count * is_last + 11 * count + 13 * count
        assert mine.grad.tolist() == [expected] * 2
    hvd.remove_process_set(some)


@case(name=["none", "fp16", "bf16"])
def through_compression(name: str) -> None:
    mine = torch.ones(3, requires_grad=True)
    hvd.allreduce(mine, op=hvd.Sum, compression=getattr(hvd.Compression, name)).sum().backward()
    assert mine.grad is not None
    assert mine.grad.dtype == torch.float32
    assert mine.grad.tolist() == [hvd.size()] * 3


GROUPS: dict[str, tuple[Callable[[list[Tensor]], list[Tensor]], Callable[[Tensor], Tensor]]] = {
    "allreduce": (lambda xs: hvd.grouped_allreduce(xs, op=hvd.Sum), lambda x: hvd.allreduce(x, op=hvd.Sum)),
    "max": (lambda xs: hvd.grouped_allreduce(xs, op=hvd.Max), lambda x: hvd.allreduce(x, op=hvd.Max)),
    "allgather": (hvd.grouped_allgather, hvd.allgather),
    "reducescatter": (hvd.grouped_reducescatter, hvd.reducescatter),
}


@case(kind=GROUPS)
def one_backward_pass_for_each_of_a_group(kind: str) -> None:
    """Follows Horovod's users: `for y in hvd.grouped_allreduce(xs): y.backward()`."""
    group, single = GROUPS[kind]
    for backwards in (False, True):
        ours = [torch.full((3, 2), hvd.rank() + n + 1.0).requires_grad_() for n in range(3)]
        theirs = [one.detach().clone().requires_grad_() for one in ours]
        results = group(ours)
        for result in reversed(results) if backwards else results:
            result.square().sum().backward()
        for one in reversed(theirs) if backwards else theirs:
            single(one).square().sum().backward()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.grad, other.grad)
    xs = [torch.ones(2, requires_grad=True) for _ in range(2)]
    sum(y.sum() for y in group(xs)).backward()
    assert all(x.grad is not None for x in xs)
