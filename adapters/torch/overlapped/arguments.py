"""The models that `overlap_forward` is for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sirtaki.torch.overlapped.parameter import land
from sirtaki.torch.sharded.kinds import updates_parameters_alone
from sirtaki.torch.wrapping import Optimizer


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
