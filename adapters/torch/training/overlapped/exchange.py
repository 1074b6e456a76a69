"""The all-reduce of gradients by urgency: in parts of bounded size, the first layers' gradients first.

(Jayarajan et al., "Priority-based Parameter Propagation", arXiv 1905.03960; Peng et al., "ByteScheduler",
SOSP 2019.) The core sends the parts of the highest priority first, and few at a time, so that gradients that
are computed later, but are needed earlier, overtake the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import ABSENT, ALLREDUCE
from sirtaki.common.ops.process_sets import joins_of
from sirtaki.common.ops.requests import Call
from sirtaki.common.ops.tensor import ROW_MAJOR, TensorView
from sirtaki.common.training.prepared import PreparedRequests
from sirtaki.torch import device
from sirtaki.torch.ops.tensors import code_of, refuse_shared_gradients
from sirtaki.torch.training.parameters import NamedParameter, store_gradient
from sirtaki.torch.training.stage import ExchangeOptions, Gradients

_FIRST_ROUND_BY_USE = 3  # rounds are counted from 1; the order of use is known on all ranks by then


class _Submitted(NamedTuple):
    """A gradient in flight: as the program has it, as it is exchanged, and how to undo its compression."""

    gradient: Tensor | None
    exchanged: Tensor
    undo: Any
    is_absent: bool


class UrgentGradients(Gradients):
    """The all-reduce of an optimizer's gradients, by parameter index: dense gradients on the CPU.

    A round begins with the first `start` after `complete` has completed the last gradient.
    """

    def __init__(self, options: ExchangeOptions, named: Sequence[NamedParameter]) -> None:
        super().__init__(options, named)
        self._part_bytes = self._context.setting_integer("partition_bytes")
        self._prepare_requests()
        self._uses: dict[int, None] = {}  # parameters in the order in which a forward pass has used them
        self._round = 0  # since the last join: ranks that had joined have missed some
        self._joins = joins_of(self._context, self._set_number)
        self._seen_joins = self._joins.count
        self._submitted: dict[int, _Submitted] = {}
        self._slots: dict[int, range] = {}  # by parameter in flight, the requests of this round
        self._describe_all(range(len(named)), by_use=False)

    def _prepare_requests(self) -> None:
        """Prepares a request for each part of the parameters, with their present dtypes and sizes."""
        self._kinds = self._present_kinds()
        empty = (torch.empty(0, dtype=parameter.dtype) for parameter in self._parameters)
        self._samples = [
            self._compression.compress(tensor)[0] for tensor in empty
        ]  # of the dtypes that are exchanged
        self._parts: list[range] = []  # by parameter, the requests of its parts
        self._elements: list[int] = []  # of a part
        self._requests = PreparedRequests(self._context, self._divide(), device)

    def _present_kinds(self) -> list[tuple[torch.dtype, torch.Size]]:
        return [(parameter.dtype, parameter.shape) for parameter in self._parameters]

    def _divide(self) -> int:
        """Divides the parameters into parts. Returns the number of all parts."""
        first = 0
        for parameter, sample in zip(self._parameters, self._samples, strict=True):
            elements = max(1, self._part_bytes // sample.element_size())
            if parameter.dim():  # parts of whole rows, if possible: the core compares their shapes
                row = max(1, parameter.numel() // max(1, parameter.shape[0]))
                elements = max(elements // row * row, min(elements, row))
            count = max(1, -(-parameter.numel() // elements))
            self._parts.append(range(first, first + count))
            self._elements.append(elements)
            first += count
        return first

    def _describe_all(self, order: Sequence[int], by_use: bool) -> None:
        """Describes all parts; the parameters that come first in `order` are the most urgent.

        Ranks may have different orders: the core takes the highest priority of each part. It keeps the
        priorities of the names that it has seen, so that other priorities need other names.
        """
        self._order = list(order)
        for place, number in enumerate(self._order):
            parts, shapes = self._parts[number], self._shapes(number)
            dtype = code_of(self._samples[number], self._names[number])
            for part, (index, shape) in enumerate(zip(parts, shapes, strict=True)):
                position = f"part {part + 1}" if len(parts) > 1 else ""
                remarks = ", ".join(remark for remark in (position, "by use" if by_use else "") if remark)
                name = f"{self._names[number]} ({remarks})" if remarks else self._names[number]
                view = TensorView(0, shape, dtype, ROW_MAJOR, None)
                call = Call(name, self._set_number)
                self._requests.describe(index, ALLREDUCE, view, call, self._how, len(self._order) - place)

    def _shapes(self, number: int) -> list[tuple[int, ...]]:
        """Returns the shapes of a parameter's parts: rows of it, or elements if a row is no part."""
        shape, count = tuple(self._parameters[number].shape), len(self._parts[number])
        if count == 1:
            return [shape]
        step, total = self._elements[number], self._parameters[number].numel()
        sizes = [min(step, total - step * part) for part in range(count)]
        row = total // shape[0]
        return [(size // row, *shape[1:]) if step % row == 0 else (size,) for size in sizes]

    # ---- A round ---------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> list[int]:
        """Returns the indices of the parameters with gradients in flight."""
        return list(self._submitted)

    @property
    def knows_uses(self) -> bool:
        """Returns whether the order of use is no longer observed."""
        return self._round >= _FIRST_ROUND_BY_USE

    def note_use(self, number: int) -> None:
        """Records that a forward pass uses a parameter, after the parameters that were recorded before."""
        if not self.knows_uses:
            self._uses[number] = None

    def start(self, numbers: list[int], absent: bool) -> None:
        """Submits gradients; `absent` marks gradients that were not computed in this pass."""
        if numbers and not self._submitted:
            self._begin_round()
        with torch.no_grad():
            prepared = {number: self._prepare(number, absent) for number in numbers}
        if prepared:
            self._submit(prepared, absent)

    def _begin_round(self) -> None:
        has_changed = self._present_kinds() != self._kinds
        if has_changed:  # as by model.double()
            self._prepare_requests()
        if has_changed or self._joins.count != self._seen_joins:  # on all ranks before the same round
            self._seen_joins, self._round = self._joins.count, 0
            self._uses.clear()
            self._describe_all(range(len(self._parameters)), by_use=False)
        self._round += 1
        if self._round == _FIRST_ROUND_BY_USE:
            rest = (number for number in range(len(self._parameters)) if number not in self._uses)
            self._describe_all([*self._uses, *rest], by_use=True)

    def _prepare(self, number: int, absent: bool) -> _Submitted:
        parameter, gradient = self._parameters[number], self._parameters[number].grad
        if gradient is None:
            source = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        elif gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"the gradient of {self._names[number]!r} is sparse, and overlap_forward is for dense ones: "
                "make the layer with sparse=False, or leave out overlap_forward"
            )
        else:
            source = gradient.detach()
        compressed, undo = self._compression.compress(source)
        exchanged = compressed.resolve_conj().resolve_neg().contiguous()
        return _Submitted(gradient, exchanged, undo, absent)

    def _submit(self, prepared: dict[int, _Submitted], absent: bool) -> None:
        indices: list[int] = []
        targets: list[int] = []
        sources: list[int] = []
        kept: list[Tensor] = []
        for number, gradient in prepared.items():
            parts, exchanged = self._parts[number], gradient.exchanged
            step = self._elements[number] * exchanged.element_size()
            addresses = [exchanged.data_ptr() + step * part for part in range(len(parts))]
            indices += parts
            targets += addresses
            sources += [0] * len(parts) if absent and gradient.gradient is None else addresses
            kept += [exchanged] * len(parts)
        try:
            slots = self._requests.submit(indices, sources, targets, kept, ABSENT if absent else 0)
        except ValueError:
            pairs = (self._submitted | prepared).items()
            refuse_shared_gradients((self._names[number], gradient.exchanged) for number, gradient in pairs)
            raise
        begin = slots.start
        for number in prepared:
            end = begin + len(self._parts[number])
            self._slots[number] = range(begin, end)
            begin = end
        self._submitted |= prepared

    # ---- Its end ---------------------------------------------------------------------------------------

    def arrived(self, used: int) -> list[int]:
        """Returns gradients in flight that have arrived besides that of a parameter that is used now.

        The most urgent ones arrive first, so it looks no further than to the first that has not arrived.
        """
        found = []
        for number in self._order:
            if number in self._submitted and number != used:
                if not self._requests.has_ended(self._slots[number]):
                    break
                found.append(number)
        return found

    def complete(self, number: int) -> None:
        """Waits for a gradient in flight, and puts its result in place.

        Raises:
            HorovodInternalError: its exchange failed.
            KeyboardInterrupt: the wait was interrupted; it is still in flight.
        """
        gradient, slots = self._submitted[number], self._slots[number]
        try:
            with self._context.steps.exposed:
                self._requests.wait(slots)
        except KeyboardInterrupt:
            raise
        except BaseException:
            self._end(number)
            raise
        if not (gradient.is_absent and self._requests.is_untouched(slots.start)):
            with torch.no_grad():
                restored = self._compression.decompress(gradient.exchanged, gradient.undo)
                store_gradient(self._parameters[number], gradient.gradient, restored)
        self._end(number)

    def _end(self, number: int, *, is_in_flight: bool = False) -> None:
        del self._submitted[number]
        self._requests.end(self._slots.pop(number), are_in_flight=is_in_flight)

    def discard(self) -> None:
        """Ends a round that has failed."""
        for number in self.in_flight:
            self._end(number, is_in_flight=True)
