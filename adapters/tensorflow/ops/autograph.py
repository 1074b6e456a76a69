"""Controls how functions of this package are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., object])


def as_written(function: F) -> F:
    """Excludes a function from AutoGraph: it has no branch on a value known only later.

    Reading its source and that of all callees would cost a second when a program is first traced.
    """
    return tf.autograph.experimental.do_not_convert(function)
