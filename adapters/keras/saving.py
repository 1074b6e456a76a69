"""Loads models from files, and makes their optimizers distributed again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from sirtaki.keras.compression import Compression, Compressor
from sirtaki.keras.optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type[Any]] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Loads a model, saved with or without sirtaki, and makes its optimizer a distributed one.

    All ranks must call it; or rank 0 alone saves and loads, and the others get its weights by
    `broadcast_model`.

    Args:
        filepath: as for `keras.models.load_model`.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: other classes and functions that Keras does not know, by name.
        compression: as for `DistributedOptimizer`.
        legacy_opts: has to be False: there are no legacy optimizers in Keras 3.
        options: further arguments of `DistributedOptimizer`.

    Returns:
        The model, with the state of the optimizer that it was saved with.

    Raises:
        ValueError: the file cannot be loaded, or wrong arguments.
        NotInitializedError: init() has not been called.
    """
    if legacy_opts:
        raise ValueError("legacy_opts is True, but Keras 3 has no legacy optimizers: leave it out")
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model
