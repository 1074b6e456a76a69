"""The helpers of `horovod.tensorflow.util` that programs import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

__all__ = ["_cache", "_executing_eagerly", "_make_subgraph", "refs_to_vars", "vars_to_refs"]

_Result = TypeVar("_Result")

_executing_eagerly = tf.executing_eagerly
_make_subgraph = tf.function


def _cache(f: Callable[..., _Result]) -> Callable[..., _Result]:
    """Returns a function that calls `f` once for the same hashable arguments, eagerly and in a graph."""
    known: dict[Any, _Result] = {}

    def call(*args: Any) -> _Result:
        key = (args, tf.executing_eagerly())
        if key not in known:
            known[key] = f(*args)
        return known[key]

    return call


def vars_to_refs(vars: Any) -> Any:  # noqa: A002
    """Returns a variable's hashable reference; for a list, which may be nested, a tuple."""
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Reverts `vars_to_refs`."""
    return [refs_to_vars(ref) for ref in refs] if isinstance(refs, tuple) else refs.deref()
