"""Where the values of a model's variables are while it is trained."""

from __future__ import annotations

from typing import Any


def take_back(model: Any) -> None:
    """Makes a model's variables have their values, so that they can be read and changed between two batches.

    On the JAX backend Keras passes them from step to step instead, and leaves the variables behind.
    """
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()
