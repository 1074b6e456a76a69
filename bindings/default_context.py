"""Finds the calling code's context: the process's own, unless a thread has selected another.

Only module-level functions (`hvd.allreduce`, …) look it up. Objects that live longer, such as handles and
optimizers, keep the context that they were created with: autograd calls them from other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import NotInitializedError


@dataclass
class _Process:
    """The context that init() made in this process."""

    context: Context | None = None
    was_shut_down: bool = False
    after_init: list[Callable[[Context], None]] = field(default_factory=list)  # what frameworks do then


process = _Process()
_thread_context: ContextVar[Context | None] = ContextVar("sirtaki_context", default=None)


def find() -> Context | None:
    """Returns the current context; None before init() and after shutdown()."""
    return _thread_context.get() or process.context


def current() -> Context:
    """Returns the current context.

    Raises:
        NotInitializedError: no context is current.
    """
    context = _thread_context.get() or process.context
    if context is None:
        state = "already shut down" if process.was_shut_down else "not initialised"
        when = "again before" if process.was_shut_down else "in every rank, before"
        raise NotInitializedError(f"sirtaki is {state} in this process: call hvd.init() {when} anything else")
    return context


@contextmanager
def using(context: Context) -> Iterator[Context]:
    """Makes a context current for this thread (or asyncio task), as when ranks are threads."""
    token = _thread_context.set(context)
    try:
        yield context
    finally:
        _thread_context.reset(token)
