"""The optimizers that can work on slices, and the arguments that do not go with slices."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from sirtaki.bindings.context import Context
from sirtaki.common.groups import Groups
from sirtaki.common.ops import Adasum, Average, Sum
from sirtaki.torch.compressed.state import CompressionState

STATE, GRADIENTS = "state", "gradients"

# Each element of the parameters is updated from its own gradient and state alone.
_ELEMENTWISE: tuple[str, ...] = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad")
_ELEMENTWISE += ("RMSprop", "Rprop", "ASGD")
# Each parameter is updated from its own gradient and state alone.
_BY_PARAMETER = ("Adafactor", "Muon")


def _is_one_of(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> bool:
    """Returns whether the optimizer's step is that of one of torch's classes."""
    step: Any = inspect.unwrap(type(optimizer).step)
    known = [getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)]
    return any(step is inspect.unwrap(one.step) for one in known)


def needs_whole_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer looks at whole parameters, but at one at a time."""
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


def check_combination(
    shard: str | None, op: int, groups: Groups, memory: CompressionState | None, context: Context
) -> None:
    """Raises ValueError if `shard` does not go with another argument, or with the job."""
    if shard is None:
        return
    if op == Adasum:
        raise ValueError("op=Adasum needs each rank's own step with whole gradients: leave out shard")
    if shard == GRADIENTS and op not in (Average, Sum):
        raise ValueError('shard="gradients" needs op=hvd.Average or op=hvd.Sum')
    if shard == GRADIENTS and groups:
        raise ValueError('groups have no meaning with shard="gradients": leave them out')
    if memory is not None:
        raise ValueError(
            f"{memory.compression} keeps what it leaves out of whole gradients, so it does not go with "
            "shard: take Compression.fp16 or Compression.bf16"
        )
    if context.survivors is not None:
        raise ValueError(
            "shard= is not available in an elastic job, where the state of a lost rank would exist nowhere "
            "else: leave it out, or start hvdrun without --min-np"
        )
