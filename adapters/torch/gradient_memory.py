"""Gradients that live in memory which the ranks of a host share, so that their exchange copies nothing.

As with `gradient_as_bucket_view` of torch's DDP, a gradient that a backward pass has made is moved into its
place, and `.grad` becomes a view of that. While `.grad` remains that view, passes add to it where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings import shared_memory
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.shared_memory import memory_of
from sirtaki.torch._private import copy_all
from sirtaki.torch.training.stage import ExchangeOptions

_ALIGNMENT = 64  # bytes: the slices of two ranks share no cache line
EARLY_BYTES = 1 << 16  # gradients of this size are moved as soon as they are there, while a cache holds them


class GradientMemory:
    """The bucket views of parameters' gradients, by index; unsuitable parameters have none."""

    def __init__(self, context: Context, parameters: Sequence[Tensor]) -> None:
        """Allocates the places.

        Raises:
            MemoryError: there is not enough memory.
            UnsupportedError: this rank shares no memory for tensors with others.
        """
        self._parameters = parameters
        self._places: dict[int, Tensor] = {}
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = shared_memory.allocate(context, end)
        for index, (parameter, offset) in enumerate(zip(parameters, offsets, strict=True)):
            if parameter.numel() and parameter.is_contiguous():
                # Each place has a storage of its own: saving a gradient saves no other one.
                flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset)
                self._places[index] = flat.view(parameter.shape)

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
    exchange_options: ExchangeOptions, parameters: Sequence[Tensor]
) -> GradientMemory | None:
    """Returns the places for gradients if the options ask for them and all ranks can use them."""
    topology = exchange_options.scope.context.topology
    is_one_host = topology.local_size == topology.size
    if not exchange_options.in_shared_memory or not parameters or not is_one_host:
        return None
    try:
        return GradientMemory(exchange_options.scope.context, parameters)
    except UnsupportedError:  # the ranks use sockets
        return None


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
    """
    kind = torch.get_default_dtype() if dtype is None else dtype
    extents, memory = memory_of(shape, kind.itemsize)
    if not memory:  # frombuffer() refuses empty memory
        return torch.zeros(extents, dtype=kind)
    return torch.frombuffer(memory, dtype=kind).view(extents)
