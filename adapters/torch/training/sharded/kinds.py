"""The optimizers that can work on slices."""

from __future__ import annotations

import inspect
from typing import Any

import torch

STATE, GRADIENTS = "state", "gradients"

# Each element of the parameters is updated from its own gradient and state alone.
_ELEMENTWISE: tuple[str, ...] = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad")
_ELEMENTWISE += ("RMSprop", "Rprop", "ASGD")
# Each parameter is updated from its own gradient and state alone.
_BY_PARAMETER = ("Adafactor", "Muon")


def _is_one_of(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> bool:
    """Returns whether the optimizer's `step` is the method of any of these torch classes."""
    step: Any = inspect.unwrap(type(optimizer).step)
    known = [getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)]
    return any(step is inspect.unwrap(kind.step) for kind in known)


def needs_whole_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer needs whole parameters, but each separately."""
    return _is_one_of(optimizer, _BY_PARAMETER)


def updates_parameters_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether each parameter is updated from its own gradient and state alone."""
    return _is_one_of(optimizer, _ELEMENTWISE + _BY_PARAMETER)


def check_shard(shard: str | None, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError unless this is a way to divide the data of this optimizer."""
    if shard is None:
        return
    if shard not in (STATE, GRADIENTS):
        raise ValueError(f'shard is {shard!r}, but it has to be "state", "gradients" or None')
    name = type(optimizer).__name__
    if needs_whole_parameters(optimizer):
        if shard == GRADIENTS:
            raise ValueError(
                f'{name} needs the gradients of whole parameters, so shard="gradients" would give it parts: '
                'use shard="state"'
            )
    elif not _is_one_of(optimizer, _ELEMENTWISE):
        raise ValueError(
            f"shard= needs an optimizer that is known to treat each element by itself: "
            f"{', '.join(_ELEMENTWISE)} of torch.optim, or one that inherits its step, and not {name}"
        )
