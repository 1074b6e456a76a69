"""Rejects parameters with gradients that would be combined twice.

By two optimizers of sirtaki, or by torch, too: in DDP, FSDP, and their users.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

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


# ---- Claims: one reducer for each parameter, as two would combine its gradient twice -------------------


class Claim:
    """A reducer's right to exchange the gradients of its parameters, until it is released.

    A second claim by itself is no mistake: a notebook cell that runs again makes a new optimizer while the
    scheduler of the old one still holds the old one. Two claims in use are a mistake.

    Attributes:
        created: number of all claims so far.
        checked: their number at the last check that found no conflict.
    """

    _by_parameter: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()  # sets of claims
    created: ClassVar[int] = 0

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._named = named
        self.checked = 0
        for _, parameter in named:
            self._by_parameter.setdefault(parameter, WeakSet()).add(self)
        Claim.created += 1

    def release(self) -> None:
        """Releases the parameters."""
        for _, parameter in self._named:
            self._by_parameter[parameter].discard(self)

    def check_exclusive(self) -> None:
        """Raises ValueError if another reducer has a claim on any of the parameters."""
        created = Claim.created
        for name, parameter in self._named:
            if len(self._by_parameter[parameter]) > 1:
                raise ValueError(
                    f"two DistributedOptimizers exchange the gradient of parameter {name!r}, so it would be "
                    "combined over the ranks twice: before the next backward pass, delete the optimizer that "
                    "is not used any more, and what holds it, such as its learning rate scheduler"
                )
        self.checked = created
