"""How functions of this package are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., object])


def as_written(function: F) -> F:
    """A function that AutoGraph leaves alone: it branches on nothing that is known only later.

    Reading its source and that of all that it calls would cost a second where a program is traced first.
    """
    return tf.autograph.experimental.do_not_convert(function)
