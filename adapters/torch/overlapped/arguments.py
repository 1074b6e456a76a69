"""The argument `overlap_forward` of an optimizer, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sirtaki.common.ops import Adasum
from sirtaki.torch.overlapped.parameter import land
from sirtaki.torch.sharded.kinds import updates_parameters_alone
from sirtaki.torch.sparse_gradients import ExchangeOptions
from sirtaki.torch.wrapping import Optimizer


def refuse_with_overlap(exchange_options: ExchangeOptions, op: int, groups: Any) -> None:
    """Raises ValueError for another argument, or a job, that has no meaning with overlap_forward."""
    if op == Adasum:
        raise ValueError(
            "op=Adasum exchanges the changes of parameters after the step, so it has no use for "
            "overlap_forward: leave it out"
        )
    if exchange_options.memory is not None:
        raise ValueError(
            f"{exchange_options.memory.compression} exchanges all gradients together, and overlap_forward "
            "one by one: take Compression.fp16 or Compression.bf16, or leave out overlap_forward"
        )
    if groups:
        raise ValueError("overlap_forward exchanges each gradient by itself: leave out groups and num_groups")
    if exchange_options.scope.context.survivors is not None:
        raise ValueError(
            "overlap_forward is not available in an elastic job, whose commits need parameters that are the "
            "same on all ranks, and not still in flight: leave it out, or use hvdrun without --min-np"
        )


def refuse_model_with_overlap(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for an optimizer, or parameters, that cannot be updated one by one."""
    if not updates_parameters_alone(optimizer):
        raise ValueError(
            "overlap_forward needs an optimizer of torch.optim that is known to update each parameter by "
            f"itself, or one that inherits its step, and not {type(optimizer).__name__}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("overlap_forward takes its steps later, which differentiable=True cannot follow")
    for name, parameter in named:
        land(parameter)  # an earlier optimizer may still have it in flight
        if not parameter.is_cpu:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, but overlap_forward is available for "
                "parameters in the memory of the CPU only"
            )
        if type(parameter) is not torch.nn.Parameter:
            raise ValueError(
                f"parameter {name!r} is a {type(parameter).__name__}, but overlap_forward needs objects of "
                "torch.nn.Parameter itself"
            )
