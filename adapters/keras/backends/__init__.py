"""What depends on the backend that Keras runs on: how gradients get from its tensors to the core and back.

A backend is a module of this package with the functions of `Backend`. Everything else in
`sirtaki.keras` is the same for all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import keras

from sirtaki._core.errors import UnsupportedError
from sirtaki.common.ops import Average
from sirtaki.common.process_sets import ProcessSet, global_process_set

SUPPORTED = ("jax", "tensorflow", "torch")


class Gradient(NamedTuple):
    """A gradient to be reduced.

    Attributes:
        name: what the ranks recognise it by.
        value: a tensor of the backend.
        is_absent: whether this rank has none, and `value` only says what it would look like.
    """

    name: str
    value: Any
    is_absent: bool = False


class Combination(NamedTuple):
    """How gradients are combined: the operation (Horovod's number), factors before and after it; where."""

    op: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set


class Backend(Protocol):
    """What each module of this package offers."""

    def is_sparse(self, gradient: Any) -> bool:
        """Whether it is no tensor, but rows of one that can travel as they are."""
        ...

    def is_eager(self, gradients: Sequence[Any]) -> bool:
        """Whether they have values now, and are not those of a step that is being compiled."""
        ...

    def scaled(self, gradient: Any, factor: float) -> Any:
        """A gradient, sparse or not, times a number."""
        ...

    def allreduce(self, name: str, gradients: Sequence[Gradient], how: Combination) -> list[Any]:
        """Combines gradients over all ranks of the set, which complete together and are called `name`.

        Returns a tensor for each, or None where it is absent on all ranks; where some ranks have it, it
        counts as zeros on the others, and they get the result as well.
        The tensors given may be overwritten.
        """
        ...


def find() -> Backend:
    """The module for the backend that Keras has been started with.

    Raises:
        UnsupportedError: there is none.
    """
    name = keras.backend.backend()
    if name not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        raise UnsupportedError(
            f"Keras runs on the backend {name!r} here, and sirtaki.keras trains on {known}: set the "
            "environment variable KERAS_BACKEND to one of these before keras is imported"
        )
    module: Any = importlib.import_module(f"{__name__}.{name}")
    return module
