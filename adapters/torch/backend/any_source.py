"""A receive from any rank of a group, as torch.distributed shows it: its `Work`."""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from sirtaki.bindings.context import SLICE_MS, Context
from sirtaki.bindings.errors import DeadlineError
from sirtaki.torch.backend.work import UNLIMITED, GroupWork


class ReceiveFromAny(Work):
    """A receive whose sender is not known yet.

    Any thread may wait for it. Failures are those of a receive; see `GroupWork`.
    """

    def __init__(self, context: Context, tag: int, timeout: timedelta) -> None:
        super().__init__()
        self._context, self._tag, self._timeout = context, tag, timeout
        self._is_decided = threading.Event()
        self._receive: GroupWork | None = None
        self._failure: Exception | None = None
        self._sender = -1
        self._future: Any = torch.futures.Future()

    def start(self, sender: int, receive: GroupWork) -> None:
        """Goes on as the receive from a rank of the group."""
        self._sender, self._receive = sender, receive
        self._is_decided.set()
        receive.get_future().add_done_callback(self._complete)

    def fail(self, failure: Exception) -> None:
        """Ends with an error: no sender can be found."""
        self._failure = failure
        self._is_decided.set()
        self._future.set_exception(failure)

    def _complete(self, ended: Any) -> None:
        try:
            self._future.set_result(ended.value())
        except Exception as failure:
            self._future.set_exception(failure)

    def wait(self, timeout: timedelta = UNLIMITED) -> bool:
        """Waits for the message, at most for `timeout`, or for that of the group. Returns True.

        Raises:
            DeadlineError: no rank has sent one in time. The receive is still open: its tensor is not free.
            HorovodInternalError: it failed.
        """
        limit = (timeout if timeout > UNLIMITED else self._timeout).total_seconds()
        deadline = time.monotonic() + limit
        while not self._is_decided.wait(min(SLICE_MS / 1000, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"rank {self._context.rank}: no rank of the process group has sent a tensor with tag "
                    f"{self._tag} within {limit:g} s; the receive is still open, so its tensor cannot be used"
                )
        if self._failure is not None:
            raise copy.copy(self._failure)
        receive: Any = self._receive
        return bool(receive.wait(timedelta(seconds=max(0.001, deadline - time.monotonic()))))

    def is_completed(self) -> bool:
        """Returns whether the message is here, or the receive has failed. Never waits."""
        if self._receive is None:
            return self._failure is not None
        return self._receive.is_completed()

    def get_future(self) -> Any:
        """Returns a future of the tensors."""
        return self._future

    def _source_rank(self) -> int:
        """Returns the rank of the group that has sent the message; torch calls it after `wait`."""
        return self._sender
