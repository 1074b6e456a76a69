"""The values of a sharded optimizer's state, made of the slices of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirtaki.common.ops.handles import run
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.requests import ALLGATHER
from sirtaki.torch.ops.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.training.sharded.slices import Slice, in_order_of


class _Elements(NamedTuple):
    """A value that has an element for each element of its slice; it is gathered by itself."""

    dtype: torch.dtype


class _Copy(NamedTuple):
    """A tensor of another size, such as a counter of steps, on its way to other ranks."""

    tensor: Tensor
    is_on_gpu: bool


def whole_values(
    scope: CollectiveScope, state: Mapping[Tensor, dict[str, Any]], slices: Sequence[Slice]
) -> Iterator[dict[str, Any]]:
    """Gathers the state of each parameter, as the plain optimizer has it. All ranks must exhaust it."""
    known = _known_values(scope, state, slices)
    for slice_, values in zip(slices, known, strict=True):
        own = state.get(slice_.tensor, {})
        yield {
            key: _gathered(scope, slice_, own.get(key), value.dtype)
            if isinstance(value, _Elements)
            else value
            for key, value in values.items()
        }


def divide_again(
    scope: CollectiveScope, state: Mapping[Tensor, dict[str, Any]], slices: Sequence[Slice]
) -> None:
    """Cuts slices and their state in the present order of the parameters' memory. All ranks must call it."""
    values = whole_values(scope, state, slices)
    for slice_, whole in zip(slices, values, strict=True):
        own = state.get(slice_.tensor, {})
        divided = [key for key, value in own.items() if slice_.is_part(value)]
        slice_.cut_again()
        own.update({key: slice_.part(whole[key]) for key in divided})


def _known_values(
    scope: CollectiveScope, state: Mapping[Tensor, dict[str, Any]], slices: Sequence[Slice]
) -> list[dict[str, Any]]:
    """Returns the values of each parameter's state, from the first rank that has any."""
    mine = [
        {
            key: _Elements(value.dtype) if slice_.is_part(value) else _portable(value)
            for key, value in state.get(slice_.tensor, {}).items()
        }
        for slice_ in slices
    ]
    of_ranks = gather_objects(scope.context, mine, scope.derived("values").name, scope.process_set)
    known: list[dict[str, Any]] = []
    for slice_, of_one in zip(slices, zip(*of_ranks, strict=True), strict=True):
        found: dict[str, Any] = next((values for values in of_one if values), {})
        known.append({key: _placed(value, slice_.parameter) for key, value in found.items()})
    return known


def _portable(value: Any) -> Any:
    return _Copy(value.detach().cpu(), not value.is_cpu) if isinstance(value, Tensor) else value


def _placed(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, _Copy):
        return value
    return value.tensor.to(parameter.device) if value.is_on_gpu else value.tensor


def _gathered(scope: CollectiveScope, slice_: Slice, value: Any, dtype: torch.dtype) -> Tensor:
    """Returns the elements of all ranks, with the shape and the order of the parameter."""
    own = _own_elements(slice_, value, dtype)
    operation = COLLECTIVES.single(scope.context, ALLGATHER, own, scope.options())
    elements: Tensor = run(scope.context, operation)
    if slice_.has_other_order:
        return in_order_of(slice_.parameter, elements.as_strided(slice_.parameter.shape, slice_.strides))
    return elements.as_strided(slice_.parameter.shape, slice_.parameter.stride()).clone()


@torch.no_grad()
def _own_elements(slice_: Slice, value: Any, dtype: torch.dtype) -> Tensor:
    """Returns a value of a slice's state in the order of memory; no elements if this rank has none."""
    if value is None or slice_.is_empty:
        return torch.empty(0, dtype=dtype, device=slice_.parameter.device)
    if slice_.is_whole:
        shape, where = slice_.parameter.shape, slice_.parameter.device
        value = torch.empty_strided(shape, slice_.strides, dtype=dtype, device=where).copy_(value)
        return value.view(-1) if value.is_contiguous() else value.as_strided((value.numel(),), (1,))
    return value.contiguous()
