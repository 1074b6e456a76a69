"""Spans of operations in the profilers of frameworks: their queueing, and the waits for them.

A span belongs to the thread that makes the call. An operation that is waited for later has two: what lies
between them, the program does beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, TypeVar, cast

from sirtaki.bindings import request as core
from sirtaki.bindings.library import dtypes
from sirtaki.bindings.request import Batch

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Profiler(Protocol):
    """A framework's profiler."""

    @property
    def is_running(self) -> Callable[[], bool]:
        """A function that returns whether it records now. Called for each operation, so it has to be fast."""
        ...

    def span(self, name: str) -> AbstractContextManager[object]:
        """Returns a context manager; its duration is shown under this name."""
        ...


_profilers: list[Profiler] = []


def register(profiler: Profiler) -> None:
    """Shows all operations of this process in a profiler, from now on."""
    _profilers.append(profiler)


def profiled(phase: str = "", part: int | None = None) -> Callable[[_Function], _Function]:
    """Decorates a function of a caller and a batch: while a profiler runs, each call is a span.

    Its name is like "sirtaki:all_reduce, 4096 bytes of 2 tensors, process set 0", followed by the `phase`.
    `part` is the index, after the batch, of the arguments `start` and `count`; None: it has none.
    """

    def decorate(call: _Function) -> _Function:
        @functools.wraps(call)
        def run(caller: Any, batch: Batch, *arguments: Any) -> Any:
            for profiler in _profilers:
                if profiler.is_running():
                    extent = () if part is None else arguments[part : part + 2]
                    name = f"{_name_of(batch, *extent)}{phase}"
                    return _in_spans(name, call, caller, batch, *arguments)
            return call(caller, batch, *arguments)

        return cast(_Function, run)

    return decorate


def _in_spans(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    with ExitStack() as spans:
        for profiler in _profilers:
            if profiler.is_running():
                spans.enter_context(profiler.span(name))
        return call(*arguments)


@functools.cache
def _sizes() -> dict[int, int]:
    return {dtype.code: dtype.size for dtype in dtypes()}


def _name_of(batch: Batch, start: int = 0, count: int | None = None) -> str:
    """Describes requests `start` to `start + count` of a batch, which are alike."""
    requests = batch.requests[start : batch.count if count is None else start + count]
    if not len(requests):
        return "sirtaki:nothing"
    name = f"sirtaki:{core.KIND_NAMES[requests[0].kind]}"
    if requests[0].kind in (core.ADD_PROCESS_SET, core.REMOVE_PROCESS_SET):
        return name  # their shape is a list of ranks
    byte_count = sum(map(_bytes_of, requests))
    tensors = "" if len(requests) == 1 else f" of {len(requests)} tensors"
    return f"{name}, {byte_count} bytes{tensors}, process set {requests[0].process_set}"


def _bytes_of(request: Any) -> int:
    """Returns the size of a request's input."""
    return math.prod(request.shape[0 : request.dimensions]) * _sizes()[request.dtype]
