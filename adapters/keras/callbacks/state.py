"""The state of a model during training: the values of its variables, and how the ranks exchange them."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from sirtaki.keras._private import layers_of

_averaged: WeakSet[Any] = WeakSet()


def sync_variables(model: Any) -> None:
    """Stores the current values in a model's variables, so that they can be read and changed between batches.

    On the JAX backend Keras passes the values from step to step instead, and does not update the variables.
    """
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


def is_built(model: Any) -> bool:
    """Returns whether a model and all its layers have their weights."""
    return model.built and all(layer.built for layer in layers_of(model))


def mark_averaged(model: Any) -> None:
    """Records that a callback averages the variables of a model, so its optimizer may be a plain one."""
    _averaged.add(model)


def is_averaged(model: Any) -> bool:
    """Returns whether a callback averages the variables of a model."""
    return model in _averaged
