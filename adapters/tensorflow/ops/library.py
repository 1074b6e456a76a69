"""Loads TensorFlow's operations once: `library()` is the module that TensorFlow makes of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import tensorflow as tf

from sirtaki.bindings.library import PATH


@cache
def library() -> Any:
    """Returns the operations by their names, such as `sirtaki_allreduce`.

    Raises:
        ImportError: this TensorFlow cannot run them.
    """
    path = PATH.with_name("libsirtaki_tensorflow.so")
    try:
        operations = tf.load_op_library(str(path))
    except (tf.errors.OpError, RuntimeError) as error:
        raise ImportError(f"sirtaki's operations for TensorFlow cannot be opened: {error}") from None
    if not hasattr(operations, "sirtaki_allreduce"):
        raise ImportError(
            f"sirtaki.tensorflow needs TensorFlow 2.13 or newer for Linux, such as its own wheels; this is "
            f"TensorFlow {tf.__version__}, which lacks what asynchronous operations of other libraries need"
        )
    return operations


# ---- Controls how functions of this package are traced -------------------------------------------------


F = TypeVar("F", bound=Callable[..., object])


def as_written(function: F) -> F:
    """Excludes a function from AutoGraph: it has no branch on a value known only later.

    Reading its source and that of all callees would cost a second when a program is first traced.
    """
    return tf.autograph.experimental.do_not_convert(function)
