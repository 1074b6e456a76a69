"""Operations in flight on a GPU: whoever waits for one makes its CUDA stream wait, and not the host."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.bindings.request import Batch
from sirtaki.bindings.waiting import wait_for_launch
from sirtaki.torch import device
from sirtaki.torch.backend.work import UNLIMITED, GroupWork, Store


class StreamWork(GroupWork):
    """An operation on tensors of which at least one is on a GPU.

    It counts as ended once it is launched, and a stream waits for it: its results are put in place in that
    stream, and all others wait for the event behind them. Futures are completed in streams of their own.
    """

    def __init__(
        self, context: Context, batch: Batch, store: Store, results: Sequence[Tensor], timeout: timedelta
    ) -> None:
        """Takes over a batch that was queued in the current stream."""
        super().__init__(context, batch, store, results, timeout)
        self._gpu = batch.gpu
        self._started_in = device.current_stream(self._gpu)
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
        if device.current_stream(self._gpu) != self._started_in:
            device.record_stream(self._gpu, [*self._batch.keepalive, self._results])
        super()._finish()
        self._end = device.record_event(self._gpu)

    def _release(self) -> None:
        self._context.detach(self._batch)

    def _new_future(self) -> Any:
        return device.new_future(self._gpu)

    def _set_future(self) -> None:
        device.wait_event(self._gpu, self._end)
        super()._set_future()
