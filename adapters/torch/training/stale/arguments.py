"""The argument `staleness` of an optimizer, and the models that it is for."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sirtaki.torch.sync_batch_norm import SyncBatchNorm


def check_staleness(staleness: int) -> None:
    """Raises ValueError unless it is a number of updates."""
    if not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0:
        raise ValueError(
            f"staleness is {staleness!r}, but it has to be a number of updates: 0 to step with the gradients "
            "of the same step, 1 or more to run on meanwhile"
        )


def refuse_model(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for an optimizer, or parameters, that cannot train with stale gradients."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("staleness does not go with LBFGS, which needs several gradients of the same step")
    if "step" in vars(optimizer):
        raise ValueError(
            "a learning rate scheduler has replaced optimizer.step(), which would keep its gradients on this "
            "rank: make the scheduler after DistributedOptimizer(…, staleness=…)"
        )
    refuse_parameters(named)


def refuse_parameters(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for parameters that cannot train with stale gradients."""
    synchronized = _parameters_of_synchronized_layers()
    for name, parameter in named:
        if not parameter.is_cpu:
            raise ValueError(
                f"parameter {name!r} is on {parameter.device}, but staleness is available for parameters in "
                "the memory of the CPU only"
            )
        if id(parameter) in synchronized:
            raise ValueError(
                f"parameter {name!r} belongs to a SyncBatchNorm layer, whose ranks meet in every pass: with "
                "staleness they take different numbers of steps, so use BatchNorm"
            )


def _parameters_of_synchronized_layers() -> set[int]:
    kinds = (SyncBatchNorm, torch.nn.SyncBatchNorm)
    # A proxy may run code for `isinstance`.
    layers: list[Any] = [value for value in gc.get_objects() if issubclass(type(value), kinds)]
    return {id(parameter) for layer in layers for parameter in layer.parameters()}
