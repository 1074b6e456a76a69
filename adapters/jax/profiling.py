"""The profiler of JAX, in which operations outside of compiled programs are shown."""

from __future__ import annotations

from contextlib import AbstractContextManager

from jax.profiler import TraceAnnotation

from sirtaki.bindings.request import register_profiler


class JaxProfiler:
    """`jax.profiler.trace`, as a `Profiler`."""

    def is_running(self) -> bool:
        """Returns whether a trace is recorded."""
        return TraceAnnotation.is_enabled()

    def span(self, name: str) -> AbstractContextManager[object]:
        """Returns a span of `jax.profiler.TraceAnnotation`."""
        return TraceAnnotation(name)


def register() -> None:
    """Shows operations in JAX's profiler, if this JAX tells whether it records."""
    if hasattr(TraceAnnotation, "is_enabled"):
        register_profiler(JaxProfiler())
