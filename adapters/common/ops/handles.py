"""Operations, run synchronously or left in flight."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sirtaki.bindings.context import Context
from sirtaki.bindings.observing.user_code import CallSite, call_site, with_call_site
from sirtaki.bindings.request import CPU, Batch

T = TypeVar("T")


class Streams(Protocol):
    """A framework's interface to its streams: the queues of work for a GPU."""

    def current_stream(self, gpu: int, /) -> int:
        """Returns the CUDA stream in which the calling thread queues work for this GPU."""
        ...

    def record_stream(self, gpu: int, tensors: Any, /) -> None:
        """Records that work in that stream uses these tensors, which were made in another stream."""
        ...


@dataclass(slots=True)
class Operation(Generic[T]):
    """An operation that is ready to be queued.

    Attributes:
        batch: its requests, described and with the addresses of their memory.
        keepalive: the objects that must stay alive until it has ended: the tensors that it reads and writes.
        finish: makes the result, once it has ended successfully; on a GPU, once the current stream waits for
            it.
        streams: the framework's; required if a tensor is on a GPU.
    """

    batch: Batch
    keepalive: Any
    finish: Callable[[Context, Batch], T]
    streams: Streams | None = None


# Unused batches, by their number of requests. Taking a batch and returning a batch are atomic. The context
# keeps batches with their description, for calls that a program repeats, such as once per step.
_pool: defaultdict[int, list[Batch]] = defaultdict(list)
_MAX_POOLED_REQUESTS = 4096  # of one size; a process rarely has more in flight
_MOST_DESCRIBED = 256  # batches
LARGEST_DESCRIBED = 64  # requests of a batch that is kept with its description, of about 1 KiB each


def pooled_batch(count: int = 1) -> Batch:
    """Returns a batch of `count` requests, for `run` or `start`, which return it to the pool."""
    pool = _pool[count]
    return pool.pop() if pool else Batch(count)


def described(context: Context, key: Hashable) -> tuple[Hashable | None, Batch | None]:
    """Returns a key, and an unused batch that an earlier call has described under this key.

    Such a batch lacks only addresses. The key is None if it cannot be hashed: an argument is wrong then, and
    its description says so. A batch with the key that is returned will be kept for the next such call.
    """
    try:
        return key, context.described_batches.pop(key, None)
    except TypeError:
        return None, None


def recycle(context: Context, batch: Batch) -> None:
    """Releases the requests of a batch, and keeps the batch for other calls."""
    if batch.gpu == CPU:
        context.release(batch)
    else:
        context.detach(batch)
    batch.context = None
    kept = context.described_batches
    if batch.key is None or kept.setdefault(batch.key, batch) is not batch:
        _return_to_pool(batch)
        return
    while len(kept) > _MOST_DESCRIBED:
        oldest = next(iter(list(kept)), None)  # of an atomic copy: other threads change it meanwhile
        evicted = kept.pop(oldest, None)
        if evicted is not None:  # None: another thread uses the batch, or has evicted it
            _return_to_pool(evicted)


def _return_to_pool(batch: Batch) -> None:
    batch.key = None
    pool = _pool[batch.count]
    if len(pool) * batch.count < _MAX_POOLED_REQUESTS:
        pool.append(batch)


def run(context: Context, operation: Operation[T]) -> T:
    """Runs an operation and returns its result. All ranks must run it."""
    batch = operation.batch
    if batch.gpu != CPU:
        return start(context, operation).wait()
    batch.keepalive[:1] = [operation.keepalive]
    if batch.count:  # a group may be empty
        context.run(batch)
    result = operation.finish(context, batch)
    recycle(context, batch)
    return result


def run_without_tensors(context: Context, batch: Batch) -> int:
    """Runs an operation that moves no data, and returns its number: see `Context.result_number`."""
    batch.set_buffers(0, 0, 0)
    return run(context, Operation(batch, None, Context.result_number))


def start(context: Context, operation: Operation[T]) -> Handle[T]:
    """Queues an operation and returns at once. All ranks must start it."""
    batch = operation.batch
    batch.keepalive[:1] = [operation.keepalive]
    if batch.gpu != CPU and operation.streams is not None:
        batch.set_all_streams([operation.streams.current_stream(batch.gpu)] * batch.count)
    if batch.count:
        context.enqueue(batch)
    return Handle(context, operation, call_site())


def wait_in_stream(
    context: Context, batch: Batch, streams: Streams, start: int = 0, count: int | None = None
) -> None:
    """Makes the current stream wait for requests on a GPU, and keeps their memory alive no longer.

    The stream's work then comes after them. So the framework may reuse the memory where it may reuse that of
    any tensor that the stream has used: in tensors of the stream at once, in others after its work so far.

    Raises:
        HorovodInternalError: a request failed.
    """
    end = batch.count if count is None else start + count
    context.wait_in_stream(batch, streams.current_stream(batch.gpu), start, end - start)
    streams.record_stream(batch.gpu, batch.keepalive[start:end])
    batch.keepalive[start:end] = [None] * (end - start)


def _wait(context: Context, operation: Operation[T]) -> None:
    batch = operation.batch
    if batch.gpu != CPU and operation.streams is not None:
        wait_in_stream(context, batch, operation.streams)
    elif batch.count:
        context.wait(batch)


class Handle(Generic[T]):
    """An operation in flight. `poll()` returns whether it has ended; `wait()` waits and returns its result.

    With tensors on a GPU, `wait()` returns when the operation is queued there: the current CUDA stream waits
    for it, and the host does not. The tensors that it reads and writes stay alive until it has ended, even if
    the handle is dropped. Several threads may wait for it.

    Example:
        handle = hvd.allreduce_async(tensor, name="features")
        while not handle.poll():
            ...  # work of the host in the meantime
        mean = handle.wait()
    """

    __slots__ = ("_context", "_failure", "_lock", "_operation", "_result", "_started_at")

    def __init__(self, context: Context, operation: Operation[T], started_at: CallSite | None = None) -> None:
        self._context = context
        self._started_at = started_at
        self._operation: Operation[T] | None = operation
        self._result: T | None = None
        self._failure: Exception | None = None
        self._lock = threading.RLock()  # its batch returns to the pool once, whichever thread completes it

    def poll(self) -> bool:
        """Returns whether the operation has ended, successfully or not. Never waits."""
        operation = self._operation
        if operation is None:
            return True
        batch = operation.batch
        return all(self._context.poll(batch, index) for index in range(batch.count))

    def wait(self) -> T:
        """Waits for the operation and returns its result; a second call returns it again.

        Raises:
            HorovodInternalError: the operation failed; a second call raises the same.
        """
        with self._lock:
            if self._operation is not None:
                self._complete(self._operation)
        if self._failure is not None:
            raise copy.copy(
                self._failure
            )  # the raised exception refers to this frame, and therefore to this handle
        return self._result  # type: ignore[return-value]  # T may itself be optional

    def _complete(self, operation: Operation[T]) -> None:
        try:
            _wait(self._context, operation)
        except Exception as error:
            self._failure = with_call_site(error, [self._started_at]).with_traceback(None)
            self._operation = None
        else:
            self._result = operation.finish(self._context, operation.batch)
            self._operation = None
            recycle(self._context, operation.batch)


def poll(handle: Handle[T]) -> bool:
    """Returns whether an asynchronous operation has ended, so that `synchronize` would return at once.

    Example:
        handle = hvd.allreduce_async(tensor, name="features")
        while not hvd.poll(handle):
            ...  # work of the host in the meantime
        mean = hvd.synchronize(handle)
    """
    return handle.poll()


def synchronize(handle: Handle[T]) -> T:
    """Waits for an asynchronous operation and returns its result.

    Raises:
        MismatchError: the ranks disagree about the operation.
        PeerLostError: a rank died.
        HorovodInternalError: any other failure between ranks.

    Example:
        handles = [hvd.allreduce_async(tensor) for tensor in tensors]
        means = [hvd.synchronize(handle) for handle in handles]
    """
    return handle.wait()
