"""Clipping of gradients, of which a rank may have only its slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sirtaki.bindings.request import MAX, SUM
from sirtaki.common.ops.requests import ALLREDUCE_IN_PLACE, Reduction
from sirtaki.torch.training.parameters import parameters_of
from sirtaki.torch.training.sharded.gradient import ShardedGradient, own_elements

Parameters = torch.optim.Optimizer | Tensor | Iterable[Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales gradients, whole or in slices, down so that their norm is `max_norm` at most.

    Works like torch.nn.utils.clip_grad_norm_, which cannot be used with shard="gradients". With that, all
    ranks must call it, and the norm is that of the gradients of all of them together. It has the same bits on
    all ranks, and those of torch's function up to rounding.

    Args:
        parameters: an optimizer, or parameters.
        max_norm: the largest norm that gradients may have.
        norm_type: the p of the norm, a positive number, or float("inf").
        error_if_nonfinite: whether a norm that is not finite is an error.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: the norm has no positive p.
        RuntimeError: the norm is not finite, with `error_if_nonfinite`.

    Example:
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), shard="gradients")
        loss_of(model, inputs, targets).backward()
        norm = hvd.clip_grad_norm_(optimizer, max_norm=1.0)
        optimizer.step()
    """
    if not float(norm_type) > 0:
        raise ValueError(f"norm_type is {norm_type}, but it is the p of a norm: a positive number, or inf")
    gradients = _gradients(parameters)
    if not gradients:
        return torch.tensor(0.0)
    norm = _norm(gradients, float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to scale them nevertheless"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for own in map(own_elements, gradients):
        own.mul_(factor.to(own.device, own.real.dtype if own.is_complex() else own.dtype))
    return norm.to(gradients[0].real.dtype if gradients[0].is_complex() else gradients[0].dtype)


@torch.no_grad()
def clip_grad_value_(parameters: Parameters, clip_value: float) -> None:
    """Limits each element of gradients to the range from -clip_value to clip_value.

    Works like torch.nn.utils.clip_grad_value_, also with shard="gradients".

    Example:
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters()), shard="gradients")
        loss_of(model, inputs, targets).backward()
        hvd.clip_grad_value_(optimizer, clip_value=0.5)
        optimizer.step()
    """
    for own in map(own_elements, _gradients(parameters)):
        own.clamp_(min=-clip_value, max=clip_value)


def _gradients(parameters: Parameters) -> list[Tensor]:
    if isinstance(parameters, torch.optim.Optimizer):
        parameters = parameters_of(parameters)
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _norm(gradients: Sequence[Tensor], kind: float) -> Tensor:
    """Returns the norm of gradients, in 64 bits, including the slices of all ranks."""
    whole = [gradient for gradient in gradients if not isinstance(gradient, ShardedGradient)]
    slices = [gradient for gradient in gradients if isinstance(gradient, ShardedGradient)]
    parts = [_power_sum(whole, kind)]
    for name, scope in {gradient.scope.name: gradient.scope for gradient in slices}.items():
        own = [gradient.own for gradient in slices if gradient.scope.name == name]
        how = Reduction(MAX if kind == float("inf") else SUM)
        part = _power_sum(own, kind).to(slices[0].device)
        parts.append(scope.derived("norm").run(ALLREDUCE_IN_PLACE, part, how))
    total = torch.stack([part.to(gradients[0].device) for part in parts])
    return total.amax() if kind == float("inf") else total.sum() ** (1.0 / kind)


def _power_sum(tensors: Sequence[Tensor], kind: float) -> Tensor:
    """Returns the sum of the elements' p-th powers; their maximum for an infinite p."""
    norms = [
        torch.linalg.vector_norm(
            tensor, kind, dtype=torch.complex128 if tensor.is_complex() else torch.float64
        )
        for tensor in tensors
        if tensor.numel()
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return stacked.amax() if kind == float("inf") else (stacked**kind).sum()
