"""Communication in several phases, each of which needs the result of the phase before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from sirtaki.bindings.context import Context
from sirtaki.common.ops.handles import Handle

T = TypeVar("T")
# Yields the operation of each phase, is sent its result, and returns the result of all phases.
Phases = Generator[Handle[Any], Any, T]


class PhasedExchange(Generic[T]):
    """Phases in flight. The next phase starts when this rank waits for anything: ranks wait in any order."""

    def __init__(
        self, context: Context, phases: Phases[T], in_stream: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        """Starts the first phase. `in_stream` enters the stream of the tensors, in any thread."""
        self._phases, self._in_stream = phases, in_stream
        self._lock = threading.Lock()
        self._has_waiter = False
        self._failure: Exception | None = None
        self._handle: Handle[Any] | None = None
        self._result: Any = None
        self._advance(None)
        context.add_progress_callback(self._poll)

    def wait(self) -> T:
        """Waits for all phases, and returns their result; a second call returns it again.

        Raises:
            HorovodInternalError: an exchange failed.
        """
        with self._lock:
            self._has_waiter = True  # this thread starts the rest
        while self._handle is not None:
            self._advance(self._handle.wait())
        if self._failure is not None:
            raise self._failure
        return self._result

    def drop(self) -> None:
        """Begins no further phase."""
        with self._lock:
            self._handle = None

    def _poll(self) -> bool:
        """Starts the next phase if the current phase has completed. Returns whether nothing is left to do."""
        with self._lock:
            while not self._has_waiter and self._handle is not None:
                if not self._handle.poll():
                    return False
                try:
                    with self._in_stream():
                        self._advance(self._handle.wait())
                except Exception as error:  # for the thread that waits
                    self._failure, self._handle = error, None
            return True

    @torch.no_grad()
    def _advance(self, result: Any) -> None:
        try:
            self._handle = self._phases.send(result)
        except StopIteration as end:
            self._handle, self._result = None, end.value
