"""The exchange of gradients by reduce-scatter: each rank receives its slices only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import ABSENT, REDUCESCATTER
from sirtaki.common.ops.requests import Call
from sirtaki.common.ops.tensor import ROW_MAJOR, TensorView, dense_layout
from sirtaki.common.training.prepared import PreparedRequests
from sirtaki.torch import device
from sirtaki.torch.ops.tensors import code_of
from sirtaki.torch.training.parameters import GrowthHook, NamedParameter
from sirtaki.torch.training.sharded.gradient import ShardedGradient
from sirtaki.torch.training.sharded.slices import BLOCK, Partition, Slice, flat, in_order_of
from sirtaki.torch.training.stage import ExchangeOptions, Stage


class _Result(NamedTuple):
    """A slice in flight.

    Attributes:
        parameter_index: that of its parameter.
        slot: that of its request in this round.
        elements: the memory of its elements, which may be compressed.
        undo: what their decompression needs.
    """

    parameter_index: int
    slot: int
    elements: Tensor
    undo: Any


class ScatteredGradients(Stage):
    """The exchange of an optimizer's gradients, by the numbers of their parameters.

    A gradient that has been exchanged is replaced by a `ShardedGradient`. If another pass adds to it, the
    new gradient is exchanged alone, and its slice is added.
    """

    def __init__(
        self, partition: Partition, options: ExchangeOptions, named: Sequence[NamedParameter]
    ) -> None:
        super().__init__(options, named)
        self._slices: list[Slice] = [partition.slice_of(parameter) for parameter in self._parameters]
        self._requests = PreparedRequests(self._context, len(named), device)  # by parameter
        self._described_as: list[Any] = [None] * len(named)
        self._results: list[_Result] = []
        self._stand_ins: dict[int, ShardedGradient] = {}
        self._earlier: dict[int, Tensor] = {}  # slices to which the next ones are added
        self._hooks = [self._watch(index, parameter) for index, parameter in enumerate(self._parameters)]

    @property
    def is_open(self) -> bool:
        return bool(self._results)

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def drop_earlier(self) -> None:
        self._earlier.clear()

    def _watch(self, index: int, parameter: Tensor) -> GrowthHook:
        def before_growth(_: Any) -> None:
            gradient = parameter.grad
            if gradient is None:
                self._earlier.pop(index, None)
            elif isinstance(gradient, ShardedGradient):
                self._earlier[index] = gradient.own
                parameter.grad = None

        return GrowthHook(parameter, before_growth)

    def start(self, indices: list[int], absent: bool) -> list[int]:
        sent = [index for index in indices if self._takes_part(index)] if absent else indices
        if not sent:
            return []
        with torch.no_grad():
            pairs = [self._compression.compress(self._elements(index)) for index in sent]
            targets = [self._room(index, source) for index, (source, _) in zip(sent, pairs, strict=True)]
        for index, (source, _) in zip(sent, pairs, strict=True):
            if self._described_as[index] != self._kind(index, source):
                self._describe(index, source)
        sources = [source for source, _ in pairs]
        read, written = (list(map(Tensor.data_ptr, tensors)) for tensors in (sources, targets))
        kept = list(zip(sources, targets, strict=True))
        slots = self._requests.submit(sent, read, written, kept, ABSENT if absent else 0)
        self._results += [
            _Result(index, slot, elements, undo)
            for index, slot, elements, (_, undo) in zip(sent, slots, targets, pairs, strict=True)
        ]
        return []

    def _kind(self, index: int, source: Tensor) -> tuple[Any, ...]:
        """Returns the properties for which a reduce-scatter is described."""
        parameter = self._parameters[index]
        return source.dtype, device.ordinal(source), parameter.dtype, parameter.stride()

    def _describe(self, index: int, source: Tensor) -> None:
        """Describes the reduce-scatter of a gradient; `source` holds its elements.

        The core compares the order of the parameter's memory over the ranks: slices are cut in that order.
        """
        parameter = self._parameters[index]
        blocks = -(-parameter.numel() // BLOCK)
        layout = dense_layout(parameter.shape, parameter.stride()) or ROW_MAJOR
        view = TensorView(0, (blocks, BLOCK), code_of(source), layout, None, device.ordinal(source))
        call = Call(f"{self._names[index]} (slices)", self._set_number)
        self._requests.describe(index, REDUCESCATTER, view, call, self._how)
        self._described_as[index] = self._kind(index, source)
        self._hooks[index].follow()  # autograd drops hooks when the dtype or the device changes

    def finish(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        """Waits for the slices, and puts a `ShardedGradient` in the place of each gradient."""
        self._requests.wait()
        with torch.no_grad():
            for index, slot, elements, undo in self._results:
                is_new = not self._requests.is_untouched(slot)
                self._store(index, self._compression.decompress(elements, undo), is_new)
        self.discard()
        return []

    def discard(self) -> None:
        self._requests.end()
        self._results = []

    def _takes_part(self, at: int) -> bool:
        """Returns whether a gradient that is not new here is reduced: ranks freeze the same parameters."""
        parameter = self._parameters[at]
        return parameter.requires_grad or parameter.grad is not None

    def _elements(self, at: int) -> Tensor:
        """Returns the gradient's elements, padded to whole blocks; in the gradient's memory, if possible."""
        parameter, gradient = self._parameters[at], self._parameters[at].grad
        count = parameter.numel()
        missing = -count % BLOCK
        if gradient is None or isinstance(gradient, ShardedGradient):
            return torch.zeros(count + missing, dtype=parameter.dtype, device=parameter.device)
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"the gradient of {self._names[at]!r} is sparse, and shard= divides dense ones only: make "
                "the layer with sparse=False, or leave out shard"
            )
        gradient = in_order_of(parameter, gradient)
        return torch.nn.functional.pad(flat(gradient), (0, missing)) if missing else gradient

    def _room(self, at: int, source: Tensor) -> Tensor:
        """Returns memory for this rank's blocks."""
        slice_ = self._slices[at]
        blocks = -(-(slice_.end - slice_.begin) // BLOCK)
        return torch.empty(blocks * BLOCK, dtype=source.dtype, device=source.device)

    def _store(self, at: int, elements: Tensor, is_new: bool) -> None:
        parameter, slice_ = self._parameters[at], self._slices[at]
        earlier = self._earlier.pop(at, None)
        if isinstance(parameter.grad, ShardedGradient):
            earlier = parameter.grad.own
        if is_new:
            count = slice_.end - slice_.begin
            own = slice_.shaped(elements if elements.numel() == count else elements[:count])
            if earlier is not None:
                own += earlier
        elif earlier is not None:
            own = earlier
        else:
            return
        parameter.grad = self._stand_in(at, own)

    def _stand_in(self, at: int, own: Tensor) -> ShardedGradient:
        found, parameter = self._stand_ins.get(at), self._parameters[at]
        if found is None or not found.fits(parameter):
            found = self._stand_ins[at] = ShardedGradient.make(parameter, self._scope)
        found.own = own
        return found
