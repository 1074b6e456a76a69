"""Nested dictionaries, lists and tuples with tensors in them, such as a `state_dict()`."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]  # the keys and indices that lead to a value
_DICTIONARIES = (dict, OrderedDict)
_SEQUENCES = (list, tuple)


def mapped(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Copies nested dictionaries, lists and tuples, with `change(path, leaf)` for each leaf.

    Objects of their subclasses, such as a Counter, are leaves.
    """
    if type(value) in _DICTIONARIES:
        return type(value)((key, mapped(item, change, (*path, key))) for key, item in value.items())
    if type(value) in _SEQUENCES:
        return type(value)(mapped(item, change, (*path, place)) for place, item in enumerate(value))
    return change(path, value)


def tensors_of(value: Any) -> dict[Path, Tensor]:
    """Returns the tensors in nested values, by their paths."""
    found: dict[Path, Tensor] = {}

    def note(path: Path, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            found[path] = leaf

    mapped(value, note)
    return found


def leaves_in(value: Any) -> Iterator[Any]:
    """Yields what nested dictionaries, lists and tuples, and objects of their subclasses, hold."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves_in(item)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested dictionaries, lists and tuples, and in objects of their subclasses."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


@torch.no_grad()
def copied(value: Any, memory: Any = None) -> Any:
    """Returns a deep copy of nested values.

    A tensor is copied to the tensor at the same place of `memory`, if that has the same dtype, shape, strides
    and device; strides are kept in any case.
    """
    return _rebuilt(value, memory, lambda tensor: tensor.detach().clone())


@torch.no_grad()
def placed(value: Any, memory: Any) -> Any:
    """Works like `copied`, but uses the tensors of `value` themselves where `memory` has none that fits."""
    return _rebuilt(value, memory, lambda tensor: tensor)


def _rebuilt(value: Any, memory: Any, other: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        if not isinstance(memory, Tensor) or not _fits(memory, value):
            return other(value)
        if memory is not value:
            memory.copy_(value)
        return memory
    if type(value) in _DICTIONARIES:
        own = memory if type(memory) in _DICTIONARIES else {}
        return type(value)((key, _rebuilt(item, own.get(key), other)) for key, item in value.items())
    if type(value) in _SEQUENCES:
        same = type(memory) is type(value) and len(memory) == len(value)
        own_items = memory if same else [None] * len(value)
        return type(value)(_rebuilt(item, own, other) for item, own in zip(value, own_items, strict=True))
    return copy.deepcopy(value)


def _fits(memory: Tensor, tensor: Tensor) -> bool:
    return (
        memory.shape == tensor.shape
        and memory.dtype == tensor.dtype
        and memory.device == tensor.device
        and memory.layout is tensor.layout is torch.strided
        and memory.stride() == tensor.stride()
    )
