"""Operations in flight, as torch.distributed shows them: its `Work`."""

from __future__ import annotations

import atexit
import copy
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import DeadlineError
from sirtaki.bindings.observing.user_code import program_sites, with_call_site
from sirtaki.bindings.request import Batch
from sirtaki.bindings.waiting import Watch, failure_of, wait_for, wait_for_launch, watch
from sirtaki.torch import device

UNLIMITED = timedelta(0)  # c10d's value for a wait without a limit of its own

Store = Callable[[Context, Batch], None]


class _Failed:
    """The value of a future of an operation that has failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise copy.copy(self.error)


def fail(future: Any, error: Exception) -> None:
    """Completes a future with an error, for users in Python and in C++.

    torch's `set_exception` stores the error as the value, which only Python's `wait` raises. The reducer of
    DDP, in C++, searches a value for tensors by pickling it, and crashes if it has none. Here pickling raises
    the error.
    """

    def raise_error(value: _Failed) -> None:
        raise copy.copy(value.error)

    future._set_unwrap_func(raise_error)
    future.set_result(_Failed(error))


class GroupWork(Work):
    """An operation of a process group, on tensors in the memory of the CPU.

    Any thread may wait for it, and several may at once. Its tensors stay alive until it has ended, even if it
    is dropped. Failures are sirtaki's exceptions, and name the rank that was lost.
    """

    def __init__(
        self, context: Context, batch: Batch, store: Store, results: Sequence[Tensor], timeout: timedelta
    ) -> None:
        """Takes over a batch that was queued; `store` puts its results into the tensors `results`."""
        super().__init__()
        self._context, self._batch = context, batch
        self._store: Store | None = store
        self._results = list(results)
        self._timeout = timeout
        self._started_at = program_sites()
        self.sender: int | None = None  # the rank of the group, of a receive
        self._lock = threading.Lock()
        self._is_over = batch.count == 0
        self._failure: Exception | None = None
        self._future: Any = None
        self._is_future_set = False

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Waits for the operation, at most for `timeout`, or for that of the group. Returns True.

        Raises:
            DeadlineError: it has not ended in time. It is still in flight: its tensors are not free.
            HorovodInternalError: it failed.
        """
        limit = timeout if timeout > UNLIMITED else self._timeout
        if not self._end_within(limit.total_seconds()):
            raise DeadlineError(
                f"rank {self._context.rank}: an operation of a process group has not ended within "
                f"{limit.total_seconds():g} s, because a rank of the group has not called it, or is late; it "
                "is still in flight, so its tensors cannot be used"
            )
        self._complete()
        if self._failure is not None:
            raise copy.copy(self._failure)
        return True

    def _end_within(self, seconds: float) -> bool:
        """Waits until the operation has ended, but not longer than this; returns whether it has."""
        return self._is_over or wait_for(self._context, self._batch, seconds)

    def synchronize(self) -> None:
        """Waits, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether the operation has ended, successfully or not. Never waits."""
        return self.complete_if_ended()

    def is_success(self) -> bool:
        """Returns whether the operation has ended successfully."""
        return self.complete_if_ended() and self._failure is None

    def exception(self) -> Exception | None:
        """Returns the error of an operation that has failed; else None."""
        self.complete_if_ended()
        return self._failure

    def result(self) -> list[Tensor]:
        """Waits, and returns the tensors that the operation has written."""
        self.wait()
        return list(self._results)

    def _source_rank(self) -> int:
        """Returns the sender of a receive; torch raises RuntimeError for other operations."""
        return super()._source_rank() if self.sender is None else self.sender

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Returns a future with the value of `result()`."""
        with self._lock:
            is_new = self._future is None
            if is_new:
                self._future = self._new_future()
        if is_new and not self.complete_if_ended():
            with self._lock:  # another thread may complete it, which releases its handles
                if not self._is_over:
                    completer_of(self._context).add(self._context, self, self._batch)
        return self._future

    def _new_future(self) -> Any:
        return torch.futures.Future()

    def complete_if_ended(self) -> bool:
        """Returns whether the operation has ended; in that case its results are in place."""
        return self._complete()

    def _complete(self) -> bool:
        with self._lock:
            if not self._is_over:
                if not self._has_ended():
                    return False
                self._finish()
            sets_future = self._future is not None and not self._is_future_set
            self._is_future_set |= sets_future
        if sets_future:  # its callbacks may wait for this operation
            self._set_future()
        return True

    def _set_future(self) -> None:
        if self._failure is None:
            self._future.set_result(self._results)
        else:
            fail(self._future, self._failure)

    def _has_ended(self) -> bool:
        return all(self._context.poll(self._batch, index) for index in range(self._batch.count))

    def _finish(self) -> None:
        """Stores the results. A thread that still waits in the core sees that the handles are gone."""
        failure = failure_of(self._context, self._batch)
        if failure is None and self._store is not None:
            try:
                self._store(self._context, self._batch)
            except Exception as error:
                failure = error.with_traceback(None)
        self._failure = None if failure is None else with_call_site(failure, self._started_at)
        self._store = None
        self._release()
        self._is_over = True

    def _release(self) -> None:
        self._context.release(self._batch)


class CoalescedWork(Work):
    """Several operations with a common wait."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Waits for all, and raises the first failure."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Returns whether all have ended."""
        return sum(work.is_completed() for work in self._works) == len(self._works)


# ---- The completion of futures -------------------------------------------------------------------------

# A thread per context completes futures of operations in flight. It sleeps until an operation has ended.
#
# An operation that nobody has asked for a future needs no thread: whoever waits for it drives the engine.


# A thread without open futures stays for so many slices of 100 ms: the next step of a training soon has more.
_IDLE_SLICES = 10
_END_SECONDS = 5.0  # the longest wait for a thread when the interpreter ends: a callback may take its time


class Completable(Protocol):
    """An operation with a future that a `Completer` completes."""

    def complete_if_ended(self) -> bool:
        """Completes the future if the operation has ended; returns whether it has."""
        ...


class Completer:
    """The operations of a context with open futures, and the thread that completes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, Completable] = {}  # by the handles that have not been reported yet
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def add(self, context: Context, operation: Completable, batch: Batch) -> None:
        """Completes the operation's future once its batch has ended, which must not be released meanwhile."""
        with self._lock:  # the thread sees an operation only once it is both watched and pending
            watch(context, batch)
            self._pending.update(dict.fromkeys(batch.handles, operation))
            if self._thread is None and not self._is_ending:
                # A program may end while a peer never answers: the thread does not keep it from doing so.
                name = "sirtaki-futures"
                self._thread = threading.Thread(target=self._run, args=[context], name=name, daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Ends the thread, for the end of the interpreter: futures that are still open stay so."""
        with self._lock:
            self._is_ending, thread = True, self._thread
        if thread is not None:
            thread.join(_END_SECONDS)

    def _take(self, handles: Iterable[int]) -> list[Completable]:
        """Removes handles; returns their operations, each once, in the order of the handles."""
        with self._lock:
            found = [self._pending.pop(handle, None) for handle in handles]
        return list({id(work): work for work in found if work is not None}.values())

    def _run(self, context: Context) -> None:
        ends, idle_slices = Watch(context), 0
        while True:
            ended = ends.collect()
            self._complete(ended or [])
            idle_slices = 0 if ended else idle_slices + 1
            with self._lock:
                is_idle = not self._pending and (ended is None or idle_slices >= _IDLE_SLICES)
                if is_idle or self._is_ending:
                    self._thread = None
                    return

    def _complete(self, ended: Iterable[int]) -> None:
        """Completes operations, and keeps none of them while the thread sleeps."""
        for operation in self._take(ended):
            try:
                operation.complete_if_ended()
            except Exception:  # of one future, which must not be the end of all others
                traceback.print_exc()


_completers: weakref.WeakKeyDictionary[Context, Completer] = weakref.WeakKeyDictionary()


def completer_of(context: Context) -> Completer:
    """Returns the completer of a context, the same object in all threads."""
    return _completers.get(context) or _completers.setdefault(context, Completer())


# An interpreter that ends stops its threads where they next need its lock. Inside torch's code, as when a
# thread drops a tensor, that ends the process by an abort.
@atexit.register
def _end_all() -> None:
    for completer in list(_completers.values()):
        completer.end()


# ---- Operations in flight on a GPU ---------------------------------------------------------------------
# A wait makes the caller's CUDA stream wait, and not the host.


class StreamWork(GroupWork):
    """An operation on tensors of which at least 1 is on a GPU.

    It counts as ended once it is launched, and a stream waits for it: its results are put in place in that
    stream, and all others wait for the event behind them. Futures are completed in streams of their own.
    """

    def __init__(
        self, context: Context, batch: Batch, store: Store, results: Sequence[Tensor], timeout: timedelta
    ) -> None:
        """Takes over a batch that was queued."""
        super().__init__(context, batch, store, results, timeout)
        self._gpu = batch.gpu
        self._end: Any = None  # the event behind its results

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Makes the current stream wait for the operation. Returns True once it is launched.

        Raises the errors of `GroupWork.wait`. A failure after the launch ends the context, and is raised by
        a later call.
        """
        super().wait(timeout)
        device.wait_event(self._gpu, self._end)
        return True

    def is_completed(self) -> bool:
        """Returns whether the GPU has finished the operation, or it has failed. Never waits."""
        if not self._is_over and not super()._has_ended():
            return False
        return self.complete_if_ended() and self._end.query()

    def complete_if_ended(self) -> bool:
        with device.new_stream(self._gpu):
            return self._complete()

    def _end_within(self, seconds: float) -> bool:
        if self._is_over:
            return True
        return wait_for_launch(self._context, self._batch, device.current_stream(self._gpu), seconds)

    def _has_ended(self) -> bool:
        return self._end_within(0)

    def _finish(self) -> None:
        device.record_stream(self._gpu, [*self._batch.keepalive, self._results])
        super()._finish()
        self._end = device.record_event(self._gpu)

    def _release(self) -> None:
        if self._failure is None:  # the stream waits, so that torch may reuse the memory behind it
            self._batch.keepalive[:] = [None] * self._batch.count
        self._context.detach(self._batch)

    def _new_future(self) -> Any:
        return device.new_future(self._gpu)

    def _set_future(self) -> None:
        device.wait_event(self._gpu, self._end)
        super()._set_future()
