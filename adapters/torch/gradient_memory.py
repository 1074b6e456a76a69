"""Gradients that live where their exchange copies nothing: `gradients_in_shared_memory`.

On the CPU they are in memory that the ranks of a host share, on a GPU side by side in the GPU's memory.

As with `gradient_as_bucket_view` of torch's DDP, a gradient that a backward pass has made is moved into its
place, and `.grad` becomes a view of that. While `.grad` remains that view, passes add to it where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings import shared_memory
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import CPU
from sirtaki.bindings.shared_memory import memory_of
from sirtaki.torch import device
from sirtaki.torch._private import copy_all
from sirtaki.torch.training.parameters import NamedParameter
from sirtaki.torch.training.stage import ExchangeOptions

_ALIGNMENT = 64  # bytes: the slices of two ranks share no cache line
EARLY_BYTES = 1 << 16  # gradients of this size are moved as soon as they are there, while a cache holds them
_LARGE_BYTES = 1 << 16  # NCCL takes gradients of this size where they are: nccl_call_list.h


class GradientMemory:
    """The bucket views of parameters' gradients, by index; unsuitable parameters have none."""

    def __init__(self, parameters: Sequence[Tensor], places: dict[int, Tensor]) -> None:
        self._parameters, self._places = parameters, places
        self._gpu = max(map(device.ordinal, parameters))

    def moves_early(self, index: int) -> bool:
        """Returns whether a gradient is moved as soon as a pass has made it."""
        return index in self._places and self._places[index].nbytes >= EARLY_BYTES

    @torch.no_grad()
    def move(self, indices: Iterable[int]) -> bool:
        """Moves gradients into their bucket views, except gradients that are already there, or do not fit.

        Returns whether any gradient was moved, and so was not accumulated into a gradient of an earlier
        round.
        """
        moved: list[Tensor] = []
        places: list[Tensor] = []
        gradients: list[Any] = []
        for index in indices:
            parameter, place = self._parameters[index], self._places.get(index)
            gradient = parameter.grad
            if place is not None and gradient is not place and _fits(gradient, place):
                moved.append(parameter)
                places.append(place)
                gradients.append(gradient)
        if moved:
            copy_all(places, gradients)
            if self._gpu != CPU:  # the gradients are dropped here, and may be of another stream
                device.record_stream(self._gpu, gradients)
            for parameter, place in zip(moved, places, strict=True):
                parameter.grad = place
        return bool(moved)


def _fits(gradient: Tensor | None, place: Tensor) -> bool:
    """Returns whether a gradient can be moved there. One that autograd may differentiate again stays."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and gradient.dtype is place.dtype
        and gradient.shape == place.shape
        and not gradient.requires_grad
    )


def gradient_memory_of(
    exchange_options: ExchangeOptions, named: Sequence[NamedParameter]
) -> GradientMemory | None:
    """Returns the places for gradients if the options ask for them, and there are any.

    Raises:
        MemoryError: there is not enough memory.
    """
    if not exchange_options.in_shared_memory or not named:
        return None
    places = _places_on_gpus(named)
    topology = exchange_options.scope.context.topology
    if topology.local_size == topology.size:
        with suppress(UnsupportedError):  # the ranks use sockets
            places |= _places_in_shared_memory(exchange_options.scope.context, named)
    return GradientMemory([entry.parameter for entry in named], places) if places else None


def _places_in_shared_memory(context: Context, named: Sequence[NamedParameter]) -> dict[int, Tensor]:
    """Returns places for gradients on the CPU, by index.

    Raises:
        MemoryError: there is not enough memory.
        UnsupportedError: this rank shares no memory for tensors with others.
    """
    offsets, end = {}, 0
    for index, (_, parameter, _) in enumerate(named):
        if device.ordinal(parameter) == CPU:
            offsets[index] = end
            end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not offsets:
        return {}
    memory = shared_memory.allocate(context, end)
    places = {}
    for index, offset in offsets.items():
        parameter = named[index].parameter
        if parameter.numel() and parameter.is_contiguous():
            # Each place has a storage of its own: saving a gradient saves no other gradient.
            flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset)
            places[index] = flat.view(parameter.shape)
    return places


def _places_on_gpus(named: Sequence[NamedParameter]) -> dict[int, Tensor]:
    """Returns places for small gradients on GPUs, by index.

    They are side by side in the order of a backward pass, in which the exchange has the core fuse them.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (_, parameter, _) in reversed(list(enumerate(named))):
        is_small = 0 < parameter.nbytes < _LARGE_BYTES
        if device.ordinal(parameter) != CPU and is_small and parameter.is_contiguous():
            alike.setdefault((parameter.device, parameter.dtype), []).append(index)
    places = {}
    for (gpu, dtype), indices in alike.items():
        parameters = [named[index].parameter for index in indices]
        memory = torch.empty(sum(map(Tensor.numel, parameters)), dtype=dtype, device=gpu)
        parts = memory.split([parameter.numel() for parameter in parameters])
        for index, parameter, part in zip(indices, parameters, parts, strict=True):
            places[index] = part.view(parameter.shape).data  # which counts its own writes
    return places


# ---- Tensors in memory that the ranks of a host share --------------------------------------------------


def empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Returns a new tensor of zeros that an in-place all-reduce need not copy; any rank may call it alone.

    If all ranks of a host pass such tensors, or contiguous parts of them, to `allreduce_` or one of its
    forms, the ranks read and write each other's tensors where they are, with the same result as otherwise:
    docs/reference/shared_memory.md. Everything else treats it as any other tensor on the CPU. Where ranks
    share no memory, it is in this rank's own.

    Raises:
        OutOfMemoryError: there is not enough memory, or this rank's share of it is in use.
        NotInitializedError: init() has not been called.

    Example:
        sums = hvd.empty((256, 64), torch.float64)  # zeros, in memory that the ranks of a host share
        for inputs, targets in loader:
            sums[: len(targets), :2] += targets
        hvd.allreduce_(sums, op=hvd.Sum)  # on one host, without copies
    """
    kind = torch.get_default_dtype() if dtype is None else dtype
    extents, memory = memory_of(shape, kind.itemsize)
    if not memory:  # frombuffer() refuses empty memory
        return torch.zeros(extents, dtype=kind)
    return torch.frombuffer(memory, dtype=kind).view(extents)
