"""Autotune: rank 0 changes settings while the job trains, and keeps what makes its steps faster."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from sirtaki.bindings.context import Context

if TYPE_CHECKING:
    from sirtaki.common.autotune.tuner import Tuner

_COORDINATOR = 0
_tuners: weakref.WeakKeyDictionary[Context, Tuner] = weakref.WeakKeyDictionary()


def is_tuned(context: Context) -> bool:
    """Returns whether settings of a world may be changed, which all of its ranks know."""
    return context.size > 1 and context.setting("autotune") == "1" and context.survivors is None


def tuner_of(context: Context) -> Tuner | None:
    """Returns the tuner of a world; None on ranks other than 0, and in worlds that are not tuned.

    Raises:
        ValueError: the file of autotune_log cannot be written.
    """
    if context.rank != _COORDINATOR or not is_tuned(context):
        return None
    if context not in _tuners:
        from sirtaki.common.autotune.tuner import (
            CompiledSteps,  # imported late: few jobs need them
            Tuner,
        )

        _tuners[context] = tuner = Tuner(context)
        CompiledSteps(context, tuner).start()
    return _tuners[context]
