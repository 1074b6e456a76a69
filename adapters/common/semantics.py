"""The switch between sirtaki's rules and Horovod's, for calls that mean something else in Horovod.

Horovod's rules hold in processes that import sirtaki under Horovod's name: `hvdrun --as-horovod` and
`import sirtaki.as_horovod` set the variable. Operations of TensorFlow choose the classes of their errors by
the same variable (bindings/tensorflow/owned.h).
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import TypeVar

from sirtaki.bindings import request as core

VARIABLE = "SIRTAKI_AS_HOROVOD"
_Number = TypeVar("_Number")  # a number, or a tensor with one


def select_horovods() -> None:
    """Selects Horovod's rules for this process, and for its child processes."""
    os.environ[VARIABLE] = "1"


def are_horovods() -> bool:
    """Returns whether Horovod's rules hold here."""
    return os.environ.get(VARIABLE) == "1"


def op_of_moved_gradients() -> int:
    """Returns the core's operation that combines the gradients of an all-gather, and of a broadcast.

    Here they add up, because the differentiated quantity is the sum of all ranks' losses. Horovod averages.
    """
    return core.AVERAGE if are_horovods() else core.SUM


def factor_of_scattered_gradients(ranks: _Number) -> _Number | int:
    """Returns the factor of gradients of rows of a sum, which Horovod multiplies by the number of ranks."""
    return ranks if are_horovods() else 1


def object_to(error: Exception) -> None:
    """Raises the error of a check that Horovod does not make; under Horovod's rules, warns with its text."""
    if not are_horovods():
        raise error
    hint(str(error))


# ---- Warnings that point at the line of the user's program instead of a library's ----------------------


_LIBRARIES = ("sirtaki", "torch", "tensorflow", "keras", "jax", "contextlib")


def hint(text: str) -> None:
    """Warns about something that the program should do differently."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
