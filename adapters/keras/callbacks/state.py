"""Access to the values of a model's variables during training."""

from __future__ import annotations

from typing import Any


def sync_variables(model: Any) -> None:
    """Stores the current values in a model's variables, so that they can be read and changed between batches.

    On the JAX backend Keras passes the values from step to step instead, and does not update the variables.
    """
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()
