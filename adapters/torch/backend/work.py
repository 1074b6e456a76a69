"""Operations in flight, as torch.distributed shows them: its `Work`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import DeadlineError
from sirtaki.bindings.request import Batch
from sirtaki.bindings.user_code import program_sites, with_call_site
from sirtaki.bindings.waiting import failure_of, wait_for
from sirtaki.torch.backend.completion import completer_of

UNLIMITED = timedelta(0)  # c10d's value for a wait without a limit of its own

Store = Callable[[Context, Batch], None]


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

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Returns a future whose value is `result()`."""
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
            self._future.set_exception(copy.copy(self._failure))

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
    """Several operations that are waited for as one."""

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
