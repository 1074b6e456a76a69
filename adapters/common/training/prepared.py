"""Requests that are described once, and submitted in each step: many at once, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sirtaki.bindings.context import Context
from sirtaki.bindings.request import CPU, Batch
from sirtaki.common.ops.handles import Streams, wait_in_stream
from sirtaki.common.ops.requests import Call, Reduction, describe
from sirtaki.common.ops.tensor import TensorView


class CapturableStreams(Streams, Protocol):
    """The streams of a framework that can record its work as a graph, which has no place for other ranks."""

    def refuse_capture(self) -> None:
        """Raises UnsupportedError if the current stream is being recorded."""
        ...


class PreparedRequests:
    """The requests of successive rounds. A round ends when each of its requests has been ended.

    Four hundred gradients cost a single call of the core, and two writes of addresses: each request is
    described by its index beforehand, and copied into a slot of the round only if the slot held another
    request before.

    Attributes:
        gpu: the GPU of the described tensors, if any is on a GPU (a rank uses a single one); else CPU.
        filled: number of slots of this round.
    """

    def __init__(self, context: Context, count: int, streams: CapturableStreams) -> None:
        self._context, self._streams = context, streams
        self._described = Batch(count or 1)  # by index
        self._batch = Batch(count or 1)  # by slot, in the order of submission
        self._indices = [-1] * count  # by slot: the index of the request that was copied there
        self._unended = 0  # number of slots
        self.gpu = CPU
        self.filled = 0

    def describe(
        self, index: int, kind: int, view: TensorView, call: Call, how: Reduction, priority: int = 0
    ) -> None:
        """Describes a request; between two rounds, it may be described again, differently."""
        describe(self._described, kind, view, 0, call, index, how=how, priority=priority)
        self._indices = [-1] * len(self._indices)
        self.gpu = max(self.gpu, view.device)

    def submit(
        self,
        indices: list[int],
        sources: Sequence[int],
        targets: Sequence[int],
        kept: Sequence[Any],
        flags: int = 0,
    ) -> range:
        """Submits requests of this round, each once.

        Args:
            indices: the requests, in an order that the caller may choose.
            sources, targets: the addresses that each of them reads and writes; a source may be 0 with ABSENT.
            kept: an object for each request that stays alive until it has ended, or a stream waits for it.
            flags: of all of them.

        Returns:
            Their slots in this round.

        Raises:
            ValueError: the core refuses a request; none of them is submitted.
        """
        begin, count, batch = self.filled, len(indices), self._batch
        end = begin + count
        if self._indices[begin:end] != indices:
            for slot, index in enumerate(indices, begin):
                batch.copy(slot, self._described, index)
            self._indices[begin:end] = indices
        batch.set_all_buffers(sources, targets, begin)
        batch.set_all_flags([flags] * count, begin)
        batch.keepalive[begin:end] = kept
        if self.gpu != CPU:
            self._streams.refuse_capture()
            batch.set_all_streams([self._streams.current_stream(self.gpu)] * count, begin)
        self._context.enqueue(batch, begin, count)
        self.filled, self._unended = end, self._unended + count
        return range(begin, end)

    def wait(self, slots: range | None = None) -> None:
        """Waits for requests of this round, by default for all; on a GPU, makes the current stream wait.

        Args:
            slots: the requests. What is kept for those on a GPU is released.

        Raises:
            HorovodInternalError: one of them failed.
            KeyboardInterrupt: the wait was interrupted; they are still in flight.
        """
        begin, count = (0, self.filled) if slots is None else (slots.start, len(slots))
        if not count:
            return
        if self.gpu == CPU:
            self._context.wait(self._batch, begin, count)
            return
        wait_in_stream(self._context, self._batch, self._streams, begin, count)

    def has_ended(self, slots: range) -> bool:
        """Returns whether these have ended, successfully or not. Never waits."""
        return all(self._context.poll(self._batch, slot) for slot in slots)

    def is_untouched(self, slot: int) -> bool:
        """Returns whether a request that has ended was ABSENT on all ranks: its target was not written."""
        return self._context.untouched(self._batch, slot)

    def contents(self, refused: int = 0) -> list[tuple[int, Any]]:
        """Returns index and kept object of each request of this round, and of `refused` requests after it."""
        end = self.filled + refused
        return list(zip(self._indices[:end], self._batch.keepalive[:end], strict=True))

    def end(self, slots: range | None = None, *, are_in_flight: bool = False) -> None:
        """Forgets requests of this round, by default all, which have ended unless `are_in_flight`."""
        begin, count = (0, self.filled) if slots is None else (slots.start, len(slots))
        if count:
            have_ended = self.gpu == CPU and not are_in_flight
            discard = self._context.release if have_ended else self._context.detach
            discard(self._batch, begin, count)
            self._unended -= count
        if not self._unended:
            self.filled = 0
