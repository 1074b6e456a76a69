"""The interface of a method of compression.

A method exchanges the tensors of a round (gradients or differences of parameters, to which the exchange has
added what was left out before), and says what it has left out this time. The exchange does everything else:
the memory, the loss scale, values that are not finite. Another method is a subclass of `Method`, and a row in
`exchange.METHODS`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import WireFormat
from sirtaki.common.ops.handles import Handle
from sirtaki.common.ops.requests import ALLGATHER, ALLREDUCE_IN_PLACE, Reduction, averages_over_contributors
from sirtaki.torch import device
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.training.compressed.state import CompressionState


@dataclass
class TensorSlot:
    """A tensor of a round.

    Attributes:
        parameter: the parameter of this gradient, or of this difference.
        values: this rank's gradient plus its residual, in row-major order and in 32 bits or more; the method
            overwrites it with the combination over all ranks.
        is_new: whether a pass of this rank has made the gradient. Otherwise it counts if another rank's is.
    """

    parameter: Tensor
    values: Tensor
    is_new: bool


class Link:
    """The other ranks, and the combination: an average or a sum, with factors."""

    def __init__(self, scope: CollectiveScope, how: Reduction) -> None:
        self._scope, self.how = scope, how
        self.context, self._counters = scope.context, scope.context.compression
        self._ranks = len(scope.ranks)

    def all_reduce(
        self, tensors: Sequence[Tensor], part: str, wire_format: WireFormat | None = None
    ) -> Handle[Any]:
        """Starts to combine tensors over all ranks, in place; in a format with blocks, if there is any."""
        if wire_format is None:
            how, count = self.how, sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        else:
            how = self.how._replace(wire_format=wire_format.code)
            count = sum(wire_format.encoded_bytes(tensor.numel()) for tensor in tensors)
        self._counters.sent_bytes += self._reduced(count)
        return self._scope.derived(part).start_group(ALLREDUCE_IN_PLACE, tensors, how)

    @property
    def shares_memory(self) -> bool:
        """Returns whether the ranks exchange through shared memory alone: formats have no effect there."""
        context = self._scope.context
        return not context.has_wire_format(self._scope.process_set.number(context))

    def all_gather(self, tensor: Tensor) -> Handle[Any]:
        """Starts to gather the bytes of all ranks, in the order of ranks; a rank that has joined has none."""
        self._counters.sent_bytes += tensor.numel() * (self._ranks - 1)
        return self._scope.derived("rows").start_group(ALLGATHER, [tensor])

    def count_exact(self, elements: int, element_bytes: int) -> None:
        """Counts gradients that are compressed."""
        self._counters.exact_bytes += self._reduced(elements * element_bytes)

    def factor(self, contributors: int) -> float:
        """Returns the factor for a sum of values, each multiplied by `how.prescale`."""
        if self.how.op != core.AVERAGE:
            return self.how.postscale
        return self.how.postscale / (
            contributors if averages_over_contributors(self.context) else self._ranks
        )

    def _reduced(self, count: int) -> float:
        return 2 * (self._ranks - 1) / self._ranks * count


class Method(ABC):
    """A compression method for the gradients of an optimizer."""

    def __init__(self, state: CompressionState, link: Link) -> None:
        self._state, self._link = state, link
        self._touched: list[int] = []  # whose tensors were new on any rank in this round, in order

    def start(self, slots: Mapping[int, TensorSlot]) -> PhasedExchange[bool]:
        """Starts the communication of a round's tensors, at least 1; `end` stores the results."""
        self._link.context.compression.exchanges += 1
        for slot in slots.values():
            self._link.count_exact(slot.parameter.numel(), slot.parameter.element_size())
        gpu = device.ordinal(next(iter(slots.values())).values)
        return PhasedExchange(self._link.context, self.phases(slots), device.this_stream(gpu))

    @torch.no_grad()
    def end(self, slots: Mapping[int, TensorSlot], keeps: bool) -> list[TensorSlot]:
        """Stores the combinations in the slots, and what this rank has left out if it `keeps` that.

        Returns the slots whose tensors were new on any rank.
        """
        squared_values = squared_errors = 0.0
        touched = {number: slots[number] for number in self._touched}
        for number, slot in touched.items():
            residual = self._state.residuals.get(slot.parameter) if keeps else None
            if residual is not None:
                squared_values += float(torch.linalg.vector_norm(slot.values)) ** 2
            self.store(number, slot, residual)
            if residual is not None:
                squared_errors += float(torch.linalg.vector_norm(residual)) ** 2
        if squared_values:
            self._link.context.compression.relative_error = (squared_errors / squared_values) ** 0.5
        return [*touched.values()]

    @abstractmethod
    def compresses(self, parameter: Tensor) -> bool:
        """Returns whether gradients of this parameter are compressed: the same on all ranks."""

    @abstractmethod
    def phases(self, slots: Mapping[int, TensorSlot]) -> Phases[bool]:
        """Exchanges the tensors of a round, by the numbers of their parameters: the same on all ranks.

        Returns whether all results are finite, the same on all ranks.
        Sets `_touched`. Nothing that is remembered may change before `store`.
        """

    @abstractmethod
    def store(self, number: int, slot: TensorSlot, residual: Tensor | None) -> None:
        """Writes the combination to `slot.values`, and what this rank has left out to `residual`, if given.

        The combination has the same bits on all ranks, whose processors may differ, so it is made by
        additions and multiplications of elements alone: they round alike everywhere, whereas sums and
        products of matrices depend on the order in which a library adds. If values of this tensor are not
        finite on some rank, at least one element is not finite on all.
        """


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients of a dtype are compressed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- The phases of all methods of an optimizer, one after another --------------------------------------


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
