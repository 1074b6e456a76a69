"""Methods that gather what each rank has chosen to send: top-k and onebit.

A rank sends one row of bytes: for each tensor a mark, whether its gradient is new, then the tensors' parts.
All ranks add up the parts in the order of ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from math import ceil

import torch
from torch import Tensor

from sirtaki.common.stateful_compression import TopK
from sirtaki.torch.compressed.method import Link, Method, Slot, compute_dtype
from sirtaki.torch.compressed.phases import Phases
from sirtaki.torch.compressed.state import CompressionState

_WORD = 8  # bytes: parts begin at multiples, so that they can be read as numbers
_SMALLEST = 1024  # elements of a tensor that is worth it
_KNOWN, _NEW = 1, 2  # marks
_SAMPLED = 64  # one element of so many estimates which are large
_MARGIN = 1.5  # times as many elements as needed should reach the bound
_LEAST_EXPECTED = 8  # in the sample; fewer say too little
_PACK = 0x0102040810204080  # times eight bytes that are 0 or 1: the highest byte has them as bits


class GatheringMethod(Method):
    """The common part: packs, gathers and adds up."""

    def __init__(self, state: CompressionState, link: Link) -> None:
        super().__init__(state, link)
        self._own: dict[int, Tensor] = {}
        self._parts: dict[int, list[Tensor]] = {}  # of each tensor, in the order of ranks
        self._touched: set[int] = set()
        self._contributors = 0

    @abstractmethod
    def length(self, parameter: Tensor) -> int:
        """Returns the bytes of a tensor's part, a multiple of 8."""

    @abstractmethod
    def encode(self, values: Tensor, part: Tensor) -> None:
        """Writes a tensor's part; `values` has one dimension."""

    @abstractmethod
    def numbers(self, part: Tensor, values: Tensor) -> Tensor:
        """Returns numbers of a part of which some are not finite if an encoded value was not."""

    @abstractmethod
    def add(self, part: Tensor, total: Tensor, scale: float) -> None:
        """Adds a part's values, times a scale, to a tensor of one dimension."""

    def compresses(self, parameter: Tensor) -> bool:
        if parameter.is_complex() or not _SMALLEST <= parameter.numel() < 1 << 31:
            return False
        return self.length(parameter) < parameter.numel() * parameter.element_size()

    def phases(self, slots: Mapping[int, Slot]) -> Phases:
        lengths = {at: self.length(slot.parameter) for at, slot in slots.items()}
        marks = [_NEW if slot.is_new else _KNOWN for slot in slots.values()]
        head = _in_words(len(marks))
        device = next(iter(slots.values())).values.device
        row = torch.zeros(head + sum(lengths.values()), dtype=torch.uint8, device=device)
        row[: len(marks)] = torch.tensor(marks, dtype=torch.uint8)
        self._own = dict(zip(slots, row[head:].split([*lengths.values()]), strict=True))
        for at, slot in slots.items():
            self.encode(slot.values.view(-1), self._own[at])
        (gathered,) = yield self._link.all_gather(row)
        rows = gathered.view(-1, len(row))
        self._contributors = len(rows)
        is_new = (rows[:, : len(marks)] == _NEW).any(dim=0).tolist()
        self._touched = {at for at, new in zip(slots, is_new, strict=True) if new}
        self._parts = {at: [] for at in slots}
        for one in rows:
            for at, part in zip(slots, one[head:].split([*lengths.values()]), strict=True):
                self._parts[at].append(part)
        finite = [
            self.numbers(part, slots[at].values).isfinite().all()
            for at in self._touched
            for part in self._parts[at]
        ]
        return not finite or bool(torch.stack(finite).all())

    def is_touched(self, number: int) -> bool:
        return number in self._touched

    def store(self, number: int, slot: Slot, residual: Tensor | None) -> None:
        values = slot.values.view(-1)
        if residual is not None:
            residual.copy_(slot.values)
            self.add(self._own[number], residual.view(-1), -1.0)
        values.zero_()
        for part in self._parts[number]:
            self.add(part, values, self._link.how.prescale)
        values *= self._link.factor(self._contributors)


class TopKMethod(GatheringMethod):
    """Sends the elements of the largest magnitude: their places in 32 bits, then their values."""

    def length(self, parameter: Tensor) -> int:
        count, width = self._count(parameter.numel()), compute_dtype(parameter.dtype).itemsize
        return _in_words(4 * count) + _in_words(width * count)

    def encode(self, values: Tensor, part: Tensor) -> None:
        count = self._count(values.numel())
        places = _largest(values.abs(), count)
        self._places(part, count).copy_(places)
        self._values(part, count, values.dtype).copy_(values[places])

    def numbers(self, part: Tensor, values: Tensor) -> Tensor:
        return self._values(part, self._count(values.numel()), values.dtype)

    def add(self, part: Tensor, total: Tensor, scale: float) -> None:
        count = self._count(total.numel())
        places = self._places(part, count).long()
        total[places] += self._values(part, count, total.dtype) * scale  # a rank's places are distinct

    def _count(self, elements: int) -> int:
        compression = self._state.compression
        assert isinstance(compression, TopK)
        return ceil(compression.fraction * elements)

    def _places(self, part: Tensor, count: int) -> Tensor:
        return part[: 4 * count].view(torch.int32)

    def _values(self, part: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        begin = _in_words(4 * count)
        return part[begin : begin + count * dtype.itemsize].view(dtype)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Returns the places of the largest elements. NaN counts as the largest.

    Selection among all elements is slow on a CPU. A sample gives a bound that few more elements reach.
    """
    sample = magnitudes[::_SAMPLED]
    expected = int(_MARGIN * count / _SAMPLED) + 1
    if not magnitudes.is_cuda and _LEAST_EXPECTED <= expected < len(sample):
        bound = sample.topk(expected).values[-1]
        candidates = (magnitudes < bound).logical_not_().nonzero().view(-1)
        if len(candidates) >= count:
            return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices


class OneBitMethod(GatheringMethod):
    """Sends the mean magnitude of a tensor's elements, and a bit for each element's sign."""

    def length(self, parameter: Tensor) -> int:
        return _WORD + _in_words(ceil(parameter.numel() / 8))

    def encode(self, values: Tensor, part: Tensor) -> None:
        part[:_WORD].view(torch.float64).copy_(values.abs().mean())
        bits = torch.zeros(8 * (len(part) - _WORD), dtype=torch.bool, device=values.device)
        torch.ge(values, 0, out=bits[: len(values)])
        packed = bits.view(torch.int64) * _PACK >> 56
        part[_WORD:].copy_(packed.bitwise_and_(0xFF))

    def numbers(self, part: Tensor, values: Tensor) -> Tensor:
        return part[:_WORD].view(torch.float64)

    def add(self, part: Tensor, total: Tensor, scale: float) -> None:
        magnitude = part[:_WORD].view(torch.float64).to(total.dtype) * scale
        signs = _signs(total.dtype, total.device) * magnitude
        total += signs.index_select(0, part[_WORD:].int()).view(-1)[: len(total)]


@cache
def _signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the signs of the eight elements that each byte stands for."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (2 * bits - 1).to(device, dtype)


def _in_words(count: int) -> int:
    """Returns a number of bytes, rounded up to whole words."""
    return -(-count // _WORD) * _WORD
