"""The whole state of an optimizer, made of the slices of all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirtaki.common.handles import run
from sirtaki.common.objects import gather_objects
from sirtaki.common.requests import ALLGATHER
from sirtaki.torch.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.sharded.optimizer import Sharded, own_elements
from sirtaki.torch.sharded.slices import Slice


class _Elements(NamedTuple):
    """A value that has an element for each element of its slice; it is gathered by itself."""

    dtype: torch.dtype


class _Copy(NamedTuple):
    """A tensor of another size, such as a counter of steps, on its way to other ranks."""

    tensor: Tensor
    is_on_gpu: bool


def full_state_dict(optimizer: torch.optim.Optimizer, root_rank: int | None = None) -> dict[str, Any]:
    """Returns an optimizer's whole state, as the plain optimizer's `state_dict()`. All ranks must call it.

    It loads into the plain optimizer, and with `optimizer.load_state_dict()` into one with shard= on any
    number of ranks. For an optimizer without shard= it is `optimizer.state_dict()`.

    Args:
        optimizer: the optimizer.
        root_rank: the only rank that gets the state, so that the others need no memory for it; they get an
            empty dictionary. None: all ranks get it.

    Raises:
        PeerLostError: a rank died.
    """
    if not isinstance(optimizer, Sharded):
        return optimizer.state_dict()
    scope = optimizer._sharding_scope.derived("full state")
    slices = optimizer._slices()
    known = _known_values(scope, optimizer, slices)
    is_kept = root_rank is None or scope.context.rank == root_rank
    state: dict[Tensor, dict[str, Any]] = {}
    for one, values in zip(slices, known, strict=True):
        own = optimizer.state.get(one.tensor, {})
        whole = {
            key: _gathered(scope, one, own.get(key), value.dtype) if isinstance(value, _Elements) else value
            for key, value in values.items()
        }
        if whole and is_kept:
            state[one.parameter] = whole
    return optimizer._full_state_dict(state) if is_kept else {}


def _known_values(scope: CollectiveScope, optimizer: Sharded, slices: list[Slice]) -> list[dict[str, Any]]:
    """Returns the values of each parameter's state, from the first rank that has any."""
    mine = [
        {
            key: _Elements(value.dtype) if one.is_part(value) else _portable(value)
            for key, value in optimizer.state.get(one.tensor, {}).items()
        }
        for one in slices
    ]
    of_ranks = gather_objects(scope.context, mine, scope.derived("values").name, scope.process_set)
    known: list[dict[str, Any]] = []
    for one, of_one in zip(slices, zip(*of_ranks, strict=True), strict=True):
        found: dict[str, Any] = next((values for values in of_one if values), {})
        known.append({key: _placed(value, one.parameter) for key, value in found.items()})
    return known


def _portable(value: Any) -> Any:
    return _Copy(value.detach().cpu(), not value.is_cpu) if isinstance(value, Tensor) else value


def _placed(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, _Copy):
        return value
    return value.tensor.to(parameter.device) if value.is_on_gpu else value.tensor


def _gathered(scope: CollectiveScope, one: Slice, value: Any, dtype: torch.dtype) -> Tensor:
    """Returns the elements of all ranks, with the shape of the parameter."""
    own = own_elements(one, value, dtype)
    operation = COLLECTIVES.single(scope.context, ALLGATHER, own, scope.options())
    elements: Tensor = run(scope.context, operation)
    return elements.as_strided(one.parameter.shape, one.parameter.stride()).clone()
