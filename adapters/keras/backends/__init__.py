"""The backend-dependent code: passes gradients between the tensors of Keras' backend and the core.

A backend is a module of this package with the functions of `Backend`. Everything else in
`sirtaki.keras` is the same for all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import keras

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Average
from sirtaki.common.training.groups import Place

SUPPORTED = ("jax", "tensorflow", "torch")


class Gradient(NamedTuple):
    """A gradient to be reduced.

    Attributes:
        name: identifies it on all ranks.
        value: a tensor of the backend.
        is_absent: whether this rank has none; `value` then only describes its shape and dtype.
    """

    name: str
    value: Any
    is_absent: bool = False


class GradientCombination(NamedTuple):
    """The combination of gradients: operation (Horovod's number), factors before and after, process set."""

    op: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: ProcessSet = global_process_set


class Backend(Protocol):
    """The interface of each module of this package.

    Exchanges for which the program waits count as exposed: outside of compiled steps, and on CPUs.
    """

    def array(self, tensor: Any) -> Any:
        """Returns a tensor's values as an array of numpy, without a copy if that is possible."""
        ...

    def is_sparse(self, gradient: Any) -> bool:
        """Returns whether a gradient consists of rows of a tensor that can be exchanged as they are."""
        ...

    def is_eager(self, gradients: Sequence[Any]) -> bool:
        """Returns whether they have values now, instead of belonging to a step that is being compiled."""
        ...

    def scaled(self, gradient: Any, factor: float) -> Any:
        """Returns a gradient, sparse or not, multiplied by a number."""
        ...

    def divided(self, gradient: Any, ranks: int) -> Any:
        """Returns a gradient, sparse or not, divided by the number of ranks.

        In a step that is compiled in an elastic job, that is their number when the step runs.
        """
        ...

    def joined(self, gradients: list[Any]) -> list[Any]:
        """Returns the results of several exchanges so that none is available before all have succeeded."""
        ...

    def allreduce(self, name: str, gradients: Sequence[Gradient], how: GradientCombination) -> list[Any]:
        """Combines gradients over all ranks of the set, which complete together under the name `name`.

        Returns a tensor for each, or None if it is absent on all ranks; if only some ranks have it, it counts
        as zeros on the others, and they get the result as well. The given tensors may be overwritten.
        """
        ...

    def first_name(self, name: str, gradients: Sequence[Gradient]) -> str | None:
        """Returns the name of the first operation of `allreduce` with these; None if there is none."""
        ...

    def require_place(self, place: Place) -> None:
        """Makes a step that is being compiled fail, or compile again, for another rank or number of ranks."""
        ...

    def broadcast(self, name: str, variables: Sequence[Any], root: int) -> None:
        """Overwrites variables of Keras with rank `root`'s values; they complete together under the name."""
        ...


def find() -> Backend:
    """Returns the module for the backend that Keras has been started with.

    Raises:
        UnsupportedError: no module supports it.
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


if keras.backend.backend() == "jax":
    importlib.import_module("sirtaki.jax.ops.gpus")  # before init(), which gives each rank a GPU
