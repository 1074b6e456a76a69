"""Derivatives of the collectives.

The convention: what is differentiated is the sum of the losses of all ranks. So the derivative of a sum is
the sum of what comes back on the ranks, that of an average their average, and a rank's slice of a gathered
tensor gets the sum of what comes back for it. (Horovod averages instead of adding for broadcast and
all-gather.) All ranks have to run the backward pass, as they ran the forward one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from sirtaki._core import request as core
from sirtaki._core.context import Context
from sirtaki._core.errors import UnsupportedError
from sirtaki.common.handles import run, start
from sirtaki.common.ops import Reduction
from sirtaki.torch import operations

_SUM = Reduction(core.SUM)


def _derived(name: str | None, what: str = "gradient") -> str | None:
    return None if name is None else f"{name}.{what}"


def is_recorded(tensor: Any) -> bool:
    """Whether autograd follows what is done with a tensor. What is no tensor is not followed."""
    return getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()


class AllReduce(Function):
    """An all-reduce; sum and average have a derivative."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: Context, how: Reduction, name: str | None) -> Tensor:
        ctx.context, ctx.how, ctx.name = context, how, name
        return run(context, operations.allreduce(tensor, how, name))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.how.op not in (core.SUM, core.AVERAGE):
            raise UnsupportedError(
                "an all-reduce with op=Min, op=Max or op=Product has no derivative here; use op=Sum or "
                "op=Average, or pass tensor.detach()"
            )
        reduced = AllReduce.apply(gradient.contiguous(), ctx.context, ctx.how, _derived(ctx.name))
        return reduced, None, None, None


class AllGather(Function):
    """An all-gather; ranks may give different numbers of rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: Context, name: str | None) -> Tensor:
        ctx.context, ctx.name = context, name
        ctx.rows = tensor.shape[0] if tensor.dim() else 0
        return run(context, operations.allgather(tensor, name))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows = start(ctx.context, operations.allgather(torch.tensor([ctx.rows]), _derived(ctx.name, "rows")))
        summed = AllReduce.apply(gradient.contiguous(), ctx.context, _SUM, _derived(ctx.name))
        first = int(rows.wait()[: ctx.context.rank].sum())
        return summed.narrow(0, first, ctx.rows), None, None


class Broadcast(Function):
    """A broadcast; all gradients add up on the root, the others' tensors have no influence."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: Context, root: int, name: str | None) -> Tensor:
        ctx.context, ctx.root, ctx.name = context, root, name
        return run(context, operations.broadcast(tensor, root, name))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        summed = AllReduce.apply(gradient.contiguous(), ctx.context, _SUM, _derived(ctx.name))
        if ctx.context.rank != ctx.root:
            summed = torch.zeros_like(summed)
        return summed, None, None, None
