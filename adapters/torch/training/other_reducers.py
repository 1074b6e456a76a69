"""Rejects parameters with gradients that torch averages, too: in DDP, FSDP, and their users."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from sirtaki.common.semantics import object_to

_INSTEAD = (
    "make the optimizer of the plain model, without it. Hugging Face's Trainer and accelerate, and "
    "Lightning, wrap the model themselves if torchrun or their own launchers start them: leave out "
    "hvd.DistributedOptimizer there, or start the ranks with hvdrun"
)
# Modules with the classes that average gradients. A module that has not been imported is not in use.
_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
}


def refuse_other_reducers(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError (warns under Horovod's rules) if torch averages or shards any of these parameters.

    Searches all objects for the wrappers, which takes a while, but only if torch.distributed is in use.
    """
    if not _several_processes():
        return
    owners = _owners()
    for name, parameter in named:
        owner = owners.get(id(parameter)) or _sharding(parameter)
        if owner:
            text = (
                f"parameter {name!r} belongs to torch's {owner} as well, so its gradient would be averaged "
                f"twice, or not at all: {_INSTEAD}"
            )
            object_to(ValueError(text))
            return


def _several_processes() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _owners() -> dict[int, str]:
    """Returns the name of the wrapper that each parameter belongs to, by the parameter's id."""
    kinds = tuple(
        getattr(sys.modules[module], name) for module, name in _WRAPPERS.items() if module in sys.modules
    )
    # A proxy may run code for `isinstance`.
    wrappers: list[Any] = [value for value in gc.get_objects() if issubclass(type(value), kinds)]
    return {
        id(parameter): type(wrapper).__name__
        for wrapper in wrappers
        if wrapper.process_group.size() > 1
        for parameter in wrapper.parameters()
        if parameter.requires_grad
    }


def _sharding(parameter: Tensor) -> str:
    kind = type(parameter)
    return kind.__name__ if kind.__module__.startswith("torch.distributed") else ""
