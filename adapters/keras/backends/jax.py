"""Gradients on the JAX backend: arrays, inside and outside of compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from sirtaki.bindings.context import current
from sirtaki.common.training.groups import Place
from sirtaki.jax import broadcast as broadcast_arrays
from sirtaki.jax import grouped_allreduce
from sirtaki.jax.ops.programs import note_size
from sirtaki.keras.backends import Gradient, GradientCombination


def array(tensor: Any) -> Any:
    """Works like `Backend.array`. Waits for the tensor."""
    return np.asarray(tensor)


def is_sparse(gradient: Any) -> bool:
    """Returns False: derivatives of JAX are dense."""
    return False


def is_eager(gradients: Sequence[Any]) -> bool:
    """Works like `Backend.is_eager`."""
    return not any(isinstance(gradient, jax.core.Tracer) for gradient in gradients)


def scaled(gradient: Any, factor: float) -> Any:
    """Works like `Backend.scaled`."""
    return gradient * factor


def divided(gradient: Any, ranks: int) -> Any:
    """Works like `Backend.divided`."""
    note_size(gradient)
    return gradient / ranks


def joined(gradients: list[Any]) -> list[Any]:
    """Works like `Backend.joined`: a program with a failed exchange has no results."""
    return gradients


def allreduce(name: str, gradients: Sequence[Gradient], how: GradientCombination) -> list[Any]:
    """Works like `Backend.allreduce`. The program defines the gradients, so they are equal on all ranks."""
    own = [gradient.value for gradient in gradients if not gradient.is_absent]
    with _exposed(own):
        reduced = grouped_allreduce(
            own,
            op=how.op,
            prescale_factor=how.prescale,
            postscale_factor=how.postscale,
            process_set=how.process_set,
            name=name,
        )
    values = iter(reduced)
    return [None if gradient.is_absent else next(values) for gradient in gradients]


def first_name(name: str, gradients: Sequence[Gradient]) -> str | None:
    """Works like `Backend.first_name`."""
    return f"{name}[0]" if any(not gradient.is_absent for gradient in gradients) else None


def require_place(place: Place) -> None:
    """Works like `Backend.require_place`."""
    note_size()


def broadcast(name: str, variables: Sequence[Any], root: int) -> None:
    """Works like `Backend.broadcast`."""
    own = [variable.value for variable in variables]
    with _exposed(own):
        values = broadcast_arrays(own, root, name)
    for item, value in zip(variables, values, strict=True):
        item.assign(value)


def _exposed(values: Sequence[Any]) -> AbstractContextManager[None]:
    """Waits for values in CPU memory; returns a context that measures their exchange as exposed."""
    if not values or not is_eager(values):
        return nullcontext()
    if any(device.platform != "cpu" for device in jax.numpy.asarray(values[0]).devices()):
        return nullcontext()
    jax.block_until_ready(values)
    return current().steps.exposed
