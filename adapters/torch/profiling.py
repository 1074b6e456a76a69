"""The profiler of torch, in which the operations of a rank are shown."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from torch.autograd import profiler

from sirtaki.bindings.request import register_profiler
from sirtaki.torch import _private


class TorchProfiler:
    """`torch.profiler.profile` and `torch.autograd.profiler.profile`, as a `Profiler`."""

    def __init__(self) -> None:
        # torch keeps a variable for such checks: whether a profiler of any thread records.
        self.is_running: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled")

    def span(self, name: str) -> AbstractContextManager[object]:
        """Returns a span of `torch.profiler.record_function`."""
        return profiler.record_function(name)


def register() -> None:
    """Shows operations in torch's profiler, if this torch has the variable."""
    if _private.set_profiler_flag is not None:
        register_profiler(TorchProfiler())
