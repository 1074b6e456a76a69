"""The facts of the world as numbers, which functions of TensorFlow must not keep in an elastic job."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from sirtaki.common import basics
from sirtaki.numpy.worlds import is_elastic

__all__ = ["local_rank", "local_size", "rank", "size"]


def _outside_functions(fact: Callable[[], int]) -> Callable[[], int]:
    """Refuses a call while an elastic job traces a function, which would keep the number of this world."""

    @functools.wraps(fact)
    def checked() -> int:
        if is_elastic() and not tf.executing_eagerly():
            name = fact.__name__
            raise ValueError(
                f"hvd.{name}() is called in a function that TensorFlow traces, which would keep this number "
                f"when the ranks change; use hvd.{name}_op(), or call hvd.{name}() outside of the function"
            )
        return fact()

    return checked


rank = _outside_functions(basics.rank)
size = _outside_functions(basics.size)
local_rank = _outside_functions(basics.local_rank)
local_size = _outside_functions(basics.local_size)
