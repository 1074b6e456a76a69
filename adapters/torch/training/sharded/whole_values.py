"""The values of a sharded optimizer's state, made of the slices that the ranks have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.requests import ALLGATHER
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.training.sharded.slices import Slice, flat, in_order_of, orders_differ


@dataclass(frozen=True)
class Part:
    """The state of consecutive elements of a parameter.

    Attributes:
        begin, end: the elements, in the order of the parameter's memory.
        strides: those of the parameter in that order.
        values: those of the optimizer, by key: `Elements`, or a value that belongs to the whole parameter.
    """

    begin: int
    end: int
    strides: tuple[int, ...]
    values: Mapping[str, Any]


class Elements(NamedTuple):
    """A value with an element for each element of its part, in the same order; described without them."""

    dtype: torch.dtype
    tensor: Tensor | None


class _Copy(NamedTuple):
    """A tensor of another size, such as a counter of steps, on its way to other ranks."""

    tensor: Tensor
    is_on_gpu: bool


def part_of(slice_: Slice, values: Mapping[str, Any]) -> Part:
    """Returns the state of a slice, without copies where its memory has the order of the parameter's."""
    return Part(
        slice_.begin,
        slice_.end,
        slice_.strides,
        {
            key: Elements(value.dtype, _in_memory_order(slice_, value)) if slice_.is_part(value) else value
            for key, value in values.items()
        },
    )


@torch.no_grad()
def _in_memory_order(slice_: Slice, value: Tensor) -> Tensor:
    if slice_.is_empty:
        return value[:0].reshape(-1)
    if not slice_.is_whole:
        return value.contiguous()
    if value.stride() != slice_.strides:
        shape, where = slice_.parameter.shape, value.device
        value = torch.empty_strided(shape, slice_.strides, dtype=value.dtype, device=where).copy_(value)
    return flat(value)


def values_of(slice_: Slice, part: Part) -> dict[str, Any]:
    """Returns the state of a slice as copies of a part of the same elements."""
    return {
        key: slice_.shaped(value.tensor.to(slice_.parameter.device, copy=True))
        if isinstance(value, Elements) and value.tensor is not None
        else _placed(value, slice_.parameter)
        for key, value in part.values.items()
    }


def described(part: Part) -> Part:
    """Returns a part without elements, to be sent as an object."""
    values = {
        key: Elements(value.dtype, None) if isinstance(value, Elements) else _portable(value)
        for key, value in part.values.items()
    }
    return Part(part.begin, part.end, part.strides, values)


def whole_values(
    scope: CollectiveScope, held: Sequence[Sequence[Part]], parameters: Sequence[Tensor]
) -> Iterator[dict[str, Any]]:
    """Gathers the state of each parameter, as the plain optimizer has it. All ranks must exhaust it.

    Args:
        scope: the ranks.
        held: what this rank contributes: lists with a part of each parameter. All lists of all ranks together
            have each element once.
        parameters: the parameters, equal on all ranks.
    """
    mine = [list(map(described, parts)) for parts in held]
    of_ranks = gather_objects(scope.context, mine, scope.derived("values").name, scope.process_set)
    lists = [parts for of_rank in of_ranks for parts in of_rank]  # in the order in which elements arrive
    for index, parameter in enumerate(parameters):
        arriving = [parts[index] for parts in lists]
        own = [parts[index].values for parts in held]
        known: Mapping[str, Any] = next((part.values for part in arriving if part.values), {})
        whole: dict[str, Any] = {}
        for key, value in known.items():
            if isinstance(value, Elements):
                elements = _gathered(scope, parameter, [values.get(key) for values in own], value.dtype)
                whole[key] = _joined(parameter, [part for part in arriving if key in part.values], elements)
            else:
                whole[key] = _placed(value, parameter)
        yield whole


def divide_again(
    scope: CollectiveScope, state: Mapping[Tensor, dict[str, Any]], slices: Sequence[Slice]
) -> None:
    """Cuts slices and their state in the present order of the parameters' memory. All ranks must call it."""
    held = [part_of(slice_, state.get(slice_.tensor, {})) for slice_ in slices]
    values = whole_values(scope, [held], [slice_.parameter for slice_ in slices])
    for slice_, whole in zip(slices, values, strict=True):
        own = state.get(slice_.tensor, {})
        divided = [key for key, value in own.items() if slice_.is_part(value)]
        slice_.cut_again()
        own.update({key: slice_.part(whole[key]) for key in divided})


def _portable(value: Any) -> Any:
    return _Copy(value.detach().cpu(), not value.is_cpu) if isinstance(value, Tensor) else value


def _placed(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, _Copy):
        return value
    return value.tensor.to(parameter.device) if value.is_on_gpu else value.tensor.clone()


def _gathered(
    scope: CollectiveScope, parameter: Tensor, own: Sequence[Elements | None], dtype: torch.dtype
) -> Tensor:
    """Returns the elements of all ranks, in the order of ranks and of each rank's parts."""
    where = parameter.device
    found = [value.tensor.to(where) for value in own if value is not None and value.tensor is not None]
    mine = found[0] if len(found) == 1 else torch.cat([torch.empty(0, dtype=dtype, device=where), *found])
    elements: Tensor = scope.run(ALLGATHER, mine.detach())
    return elements


def _joined(parameter: Tensor, parts: Sequence[Part], elements: Tensor) -> Tensor:
    """Returns a value with the shape and the order of the parameter, made of the elements of its parts."""
    whole = torch.empty(parameter.numel(), dtype=elements.dtype, device=elements.device)
    counts = [part.end - part.begin for part in parts]
    for part, own in zip(parts, elements.split(counts), strict=True):
        whole[part.begin : part.end] = own
    strides = parts[0].strides
    shaped = whole.as_strided(parameter.shape, strides)
    if orders_differ(parameter.shape, parameter.stride(), strides):
        return in_order_of(parameter, shaped)
    return whole.as_strided(parameter.shape, parameter.stride())
