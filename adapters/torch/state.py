"""An equal start on every rank: copies one rank's parameters and optimizer state to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import current
from sirtaki.common.handles import run
from sirtaki.common.objects import broadcast_object
from sirtaki.common.ops import Call
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.common.requests import BROADCAST_IN_PLACE, CollectiveOptions
from sirtaki.torch.autograd import COLLECTIVES
from sirtaki.torch.tensors import code_of, refuse_overlap, written


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies rank `root_rank`'s tensors to all ranks of the set, in place. All of them must call it.

    Args:
        params: `model.state_dict()` (buffers of any dtype are supported), `model.named_parameters()`, or a
            list of tensors, with the same names, shapes and dtypes on all ranks.
        root_rank: the rank whose tensors are copied: a rank of the world, also within a process set.
        process_set: the ranks that take part.

    Raises:
        ValueError: anything else, or a tensor that cannot be exchanged.
        MismatchError: ranks disagree about a shape or dtype.
        PeerLostError: a rank died.
    """
    named = [(f"parameter.{name}", one) for name, one in named_tensors("broadcast_parameters", params)]
    broadcast_all(current(), named, root_rank, process_set)


def named_tensors(function: str, params: Any) -> list[tuple[str, Tensor]]:
    """Returns the tensors of a state_dict(), of named parameters or of a list, with their names.

    Raises ValueError, naming the called function, for anything else.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor):
        items = list(params)
        named = [item if isinstance(item, tuple) else (str(place), item) for place, item in enumerate(items)]
    else:
        raise _not_parameters(function, "the argument", params)
    for pair in named:
        if len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise _not_parameters(function, repr(pair[0]), pair[-1])
    return named


def _not_parameters(function: str, what: str, value: Any) -> ValueError:
    return ValueError(
        f"{function} takes model.state_dict(), model.named_parameters() or a list of tensors, but {what} is "
        f"of type {type(value).__name__}; other values can be sent with broadcast_object"
    )


def broadcast_all(
    context: Context, named: Sequence[tuple[str, Tensor]], root: int, process_set: ProcessSet
) -> None:
    """Broadcasts tensors in place, all at once."""
    if not named:
        return
    sources: list[Tensor] = []
    storages: set[int] = set()
    for name, tensor in named:
        code_of(tensor, name)
        refuse_overlap(tensor, name)
        # Tensors may share their memory (tied weights), but each operation needs its own.
        storage = tensor.untyped_storage().data_ptr()
        sources.append(tensor.detach().clone() if storage in storages else tensor)
        storages.add(storage)
    number = process_set.number(context)
    calls = [Call(name, number) for name, _ in named]
    options = CollectiveOptions(root=root)
    results = run(context, COLLECTIVES.named(context, BROADCAST_IN_PLACE, sources, options, calls))
    for (_, tensor), source, result in zip(named, sources, results, strict=True):
        if source is not tensor:
            written(tensor, result)


@dataclass(frozen=True)
class _Placeholder:
    """A placeholder for a tensor in a structure that is sent."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    place: str  # "cpu" or "cuda"

    @classmethod
    def of(cls, tensor: Tensor) -> _Placeholder:
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device.type)

    def fill(self, own: Any, gpu: torch.device | None) -> Tensor:
        """Returns this rank's own tensor if it fits, else a new one; `gpu` is this rank's, if used."""
        if isinstance(own, Tensor) and _Placeholder.of(own) == self:
            return own
        scope = gpu if self.place == "cuda" and gpu is not None else self.place
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=scope)


_Path = tuple[Any, ...]


def _mapped(value: Any, path: _Path, change: Callable[[_Path, Any], Any]) -> Any:
    """Copies nested dictionaries, lists and tuples, with `change(path, leaf)` for each leaf."""
    if isinstance(value, dict):
        return {key: _mapped(item, (*path, key), change) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_mapped(item, (*path, place), change) for place, item in enumerate(value))
    return change(path, value)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies rank `root_rank`'s optimizer state to all ranks: momenta, counters, learning rates.

    All ranks of the set must call it, with optimizers of one class over matching parameters. Their previous
    state does not matter: it is enough if the root alone has loaded a checkpoint. No step is taken, so
    `model`, which Horovod needs for sparse parameters, is ignored.

    Raises:
        ValueError: an LBFGS optimizer (its state depends on the rank's own steps), or one whose parameter
            groups do not match the root's.
        PeerLostError: a rank died.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of an LBFGS optimizer cannot be broadcast: it is rebuilt as it steps")
    context = current()
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    mine = _structure(optimizer, parameters)
    structure = _mapped(mine, (), lambda _, leaf: _Placeholder.of(leaf) if isinstance(leaf, Tensor) else leaf)
    structure = broadcast_object(structure, root_rank, "optimizer", process_set)
    _check_groups(context.rank, root_rank, structure["sizes"], mine["sizes"])
    gpu = next((one.device for one in parameters if one.is_cuda), None)
    own: dict[_Path, Tensor] = {}
    _mapped(mine, (), own.__setitem__)
    tensors: list[tuple[str, Tensor]] = []

    def fill(path: _Path, leaf: Any) -> Any:
        if not isinstance(leaf, _Placeholder):
            return leaf
        tensor = leaf.fill(own.get(path), gpu)
        tensors.append((".".join(map(str, ("optimizer", *path))), tensor))
        return tensor

    filled = _mapped(structure, (), fill)
    broadcast_all(context, tensors, root_rank, process_set)
    if context.rank != root_rank:
        _restore(optimizer, parameters, filled)


def _structure(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> dict[str, Any]:
    """Returns state by the index of its parameter, the options of each group, and the groups' sizes."""
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    return {
        "state": {
            places.get(id(key), key): dict(value) if isinstance(value, dict) else value
            for key, value in optimizer.state.items()
        },
        "groups": [
            {option: value for option, value in group.items() if option not in ("params", "param_names")}
            for group in optimizer.param_groups
        ],
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
    }


def _check_groups(rank: int, root: int, theirs: list[int], mine: list[int]) -> None:
    if theirs != mine:
        raise ValueError(
            f"the optimizers differ: rank {root} has parameter groups of {theirs} parameters, rank {rank} of "
            f"{mine}; make them in the same way on all ranks"
        )


def _restore(optimizer: torch.optim.Optimizer, parameters: list[Tensor], structure: dict[str, Any]) -> None:
    optimizer.state.clear()
    for key, value in structure["state"].items():
        optimizer.state[parameters[key] if isinstance(key, int) else key] = value
    for group, options in zip(optimizer.param_groups, structure["groups"], strict=True):
        for option in [name for name in group if name not in ("params", "param_names", *options)]:
            del group[option]
        group.update(options)
