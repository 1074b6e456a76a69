"""Operations in flight, as objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from sirtaki._core.context import Context
from sirtaki._core.request import Batch

T = TypeVar("T")


class Handle(Generic[T]):
    """An operation in flight. `poll()` asks whether it has ended; `wait()` waits and returns its result.

    The tensors it reads and writes stay alive until it has ended, even if the handle is dropped.
    """

    __slots__ = ("_batch", "_context", "_failure", "_finish", "_result")

    def __init__(self, context: Context, batch: Batch, finish: Callable[[Context, Batch], T]) -> None:
        """Wraps a batch that was enqueued; `finish` turns it into the result, once it has ended well."""
        self._context = context
        self._batch: Batch | None = batch
        self._finish = finish
        self._result: T | None = None
        self._failure: Exception | None = None

    def poll(self) -> bool:
        """Whether the operation has ended, well or badly. Returns at once."""
        return self._batch is None or all(
            self._context.poll(self._batch, index) for index in range(self._batch.count)
        )

    def wait(self) -> T:
        """Waits for the operation and returns its result; a second call returns it again.

        Raises:
            HorovodInternalError: the operation failed; a second call raises the same.
        """
        if self._batch is not None:
            self._settle(self._batch)
        if self._failure is not None:
            raise self._failure
        return self._result  # type: ignore[return-value]  # T may itself be optional

    def _settle(self, batch: Batch) -> None:
        try:
            self._context.wait(batch)
        except Exception as error:
            self._failure = error
        else:
            self._result = self._finish(self._context, batch)
            self._context.release(batch)
        self._batch = None


def poll(handle: Handle[T]) -> bool:
    """Whether an asynchronous operation has ended, so that `synchronize` would return at once."""
    return handle.poll()


def synchronize(handle: Handle[T]) -> T:
    """Waits for an asynchronous operation and returns its result.

    Raises:
        MismatchError: the ranks disagree about the operation.
        PeerLostError: a rank died.
        HorovodInternalError: anything else that went wrong between ranks.
    """
    return handle.wait()
