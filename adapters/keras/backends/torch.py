"""Gradients on the torch backend: torch's tensors, reduced in place, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch

from sirtaki.bindings.context import current
from sirtaki.common.ops.collectives import with_absent
from sirtaki.common.ops.handles import run
from sirtaki.common.ops.requests import (
    ALLREDUCE_IN_PLACE,
    BROADCAST_IN_PLACE,
    Call,
    CollectiveOptions,
    reduction,
)
from sirtaki.common.training.groups import Place
from sirtaki.keras.backends import Gradient, GradientCombination
from sirtaki.torch import device
from sirtaki.torch.ops.autograd import COLLECTIVES
from sirtaki.torch.ops.tensors import shares_elements


def array(tensor: Any) -> Any:
    """Works like `Backend.array`."""
    if tensor.dtype == torch.bfloat16 or tensor.device.type != "cpu":
        return keras.ops.convert_to_numpy(tensor)
    return tensor.detach().numpy()


def is_sparse(gradient: Any) -> bool:
    """Returns False: Keras' optimizers accept dense torch tensors only; `allreduce` makes gradients dense."""
    return False


def is_eager(gradients: Sequence[Any]) -> bool:
    """Works like `Backend.is_eager`."""
    return not torch.compiler.is_compiling()


def scaled(gradient: Any, factor: float) -> Any:
    """Works like `Backend.scaled`."""
    return gradient * factor


def divided(gradient: Any, ranks: int) -> Any:
    """Works like `Backend.divided`. No step is compiled."""
    return gradient / ranks


def joined(gradients: list[Any]) -> list[Any]:
    """Works like `Backend.joined`: an exchange that fails has raised before."""
    return gradients


@torch.compiler.disable
def allreduce(name: str, gradients: Sequence[Gradient], how: GradientCombination) -> list[Any]:
    """Works like `Backend.allreduce`. Each gradient has its own name: ranks may lack different gradients."""
    context = current()
    options = CollectiveOptions(reduction=reduction(how.op, None, how.prescale, how.postscale))
    number = how.process_set.number(context)
    calls = [Call(gradient.name, number) for gradient in gradients]
    tensors = [_writable(gradient.value.detach()) for gradient in gradients]
    operation = COLLECTIVES.named(context, ALLREDUCE_IN_PLACE, tensors, options, calls)
    absent = {index for index, gradient in enumerate(gradients) if gradient.is_absent}
    with device.exposed(context, tensors):
        return run(context, with_absent(operation, absent))


def first_name(name: str, gradients: Sequence[Gradient]) -> str | None:
    """Works like `Backend.first_name`."""
    return gradients[0].name if gradients else None


def require_place(place: Place) -> None:
    """Works like `Backend.require_place`. Steps are not compiled."""


@torch.compiler.disable
def broadcast(name: str, variables: Sequence[Any], root: int) -> None:
    """Works like `Backend.broadcast`."""
    tensors = [variable.value.detach() for variable in variables]
    with device.exposed(current(), tensors):
        COLLECTIVES.run_group(BROADCAST_IN_PLACE, tensors, CollectiveOptions(name, root=root))


def _writable(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.clone() if shares_elements(dense) else dense
