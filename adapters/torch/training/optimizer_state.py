"""The state of a torch optimizer, by the positions of its parameters: the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sirtaki.torch.ops.nested import placed

_PARAMETERS = ("params", "param_names")  # keys of a parameter group that are no options


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Returns the state of each parameter by its position, and other state by its own key."""
    places = {id(parameter): place for place, parameter in enumerate(parameters_of(optimizer))}
    return {
        places.get(id(key), key): dict(value) if isinstance(value, dict) else value
        for key, value in optimizer.state.items()
    }


def set_state(optimizer: torch.optim.Optimizer, state: dict[Any, Any], parameters: list[Tensor]) -> None:
    """Replaces the state by another, which is given by the positions of these parameters, without a copy."""
    optimizer.state.clear()
    for key, value in state.items():
        optimizer.state[parameters[key] if isinstance(key, int) else key] = value


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the options of each parameter group, such as the learning rate."""
    return [
        {option: value for option, value in group.items() if option not in _PARAMETERS}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Replaces the options of each parameter group; a tensor is overwritten in place, where it fits."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for option in [name for name in group if name not in (*_PARAMETERS, *values)]:
            del group[option]
        group.update({option: placed(value, group.get(option)) for option, value in values.items()})


def group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Returns the number of parameters in each group."""
    return [len(group["params"]) for group in optimizer.param_groups]
