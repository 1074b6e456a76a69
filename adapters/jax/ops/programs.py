"""Compiled programs in an elastic job: programs that depend on the number of ranks are traced again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sirtaki.bindings.context import Context, current, is_elastic
from sirtaki.common import basics


class _Programs:
    """The programs of this process that have been traced with a rank or a number of ranks as a constant."""

    def __init__(self) -> None:
        self._context: Context | None = None  # the world in which such a program has been traced

    def note(self) -> None:
        """Records that such a program is being traced."""
        context = current()
        if context.survivors is not None and context is not self._context:
            self._context = context
            context.survivors.add(self)

    def move_to(self, context: Context) -> None:
        """Makes JAX trace and compile all programs again."""
        self.retire()

    def retire(self) -> None:
        """Makes JAX trace and compile all programs again: functions outlive the training function's calls."""
        if self._context is not None:
            self._context = None
            jax.clear_caches()


_programs = _Programs()


def note_size(operand: Any = None) -> None:
    """Records that the present rank, or number of ranks, becomes a constant of the program being traced.

    Does nothing outside of programs: `operand` is an array that would be traced; None: it is found out.
    """
    traced = jnp.zeros(()) if operand is None else operand
    if isinstance(traced, jax.core.Tracer):
        _programs.note()


# ---- The facts of the world ----------------------------------------------------------------------------


__all__ = ["cross_rank", "cross_size", "local_rank", "local_size", "rank", "size"]


def _noted(fact: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(fact)
    def noted() -> int:
        if is_elastic():
            note_size()
        return fact()

    return noted


rank, size = _noted(basics.rank), _noted(basics.size)
local_rank, local_size = _noted(basics.local_rank), _noted(basics.local_size)
cross_rank, cross_size = _noted(basics.cross_rank), _noted(basics.cross_size)
