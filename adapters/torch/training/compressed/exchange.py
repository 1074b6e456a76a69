"""The compressed gradients of an optimizer: which are, when, and what is left out of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import ceil

import torch
from torch import Tensor

from sirtaki.common.ops.process_sets import joins_of
from sirtaki.common.ops.requests import Call
from sirtaki.common.training.consistency import Comparison, checksum_of_text
from sirtaki.common.training.stateful_compression import (
    Fp8,
    Int8,
    OneBit,
    PowerSGD,
    StatefulCompression,
    TopK,
)
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.tensors import shares_elements
from sirtaki.torch.training.compressed.method import (
    Link,
    Method,
    PhasedExchange,
    Phases,
    TensorSlot,
    compute_dtype,
)
from sirtaki.torch.training.compressed.powersgd import PowerSGDMethod
from sirtaki.torch.training.compressed.quantised import QuantisedMethod
from sirtaki.torch.training.compressed.state import CompressionState
from sirtaki.torch.training.parameters import NamedParameter, store_gradient
from sirtaki.torch.training.stage import ExchangeOptions, Stage

# ---- Methods that gather what each rank has chosen to send: top-k and onebit ---------------------------
# A rank sends one row of bytes: for each tensor a mark, whether its gradient is new, then the tensors' parts.
# All ranks add up the parts in the order of ranks.


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
        self._contributors = 0

    @abstractmethod
    def length(self, parameter: Tensor) -> int:
        """Returns the bytes of a tensor's part, a multiple of 8."""

    @abstractmethod
    def encode(self, values: Tensor, part: Tensor) -> None:
        """Encodes a tensor's part of the buffer, `part`; `values` has 1 dimension."""

    @abstractmethod
    def numbers(self, part: Tensor, values: Tensor) -> Tensor:
        """Returns numbers of a part of which some are not finite if an encoded value was not."""

    @abstractmethod
    def add(self, part: Tensor, total: Tensor, scale: float) -> None:
        """Adds a decoded part, times a scale, to a tensor of 1 dimension."""

    def compresses(self, parameter: Tensor) -> bool:
        if parameter.is_complex() or not _SMALLEST <= parameter.numel() < 1 << 31:
            return False
        return self.length(parameter) < parameter.numel() * parameter.element_size()

    def phases(self, slots: Mapping[int, TensorSlot]) -> Phases[bool]:
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
        self._touched = [at for at, new in zip(slots, is_new, strict=True) if new]
        self._parts = {at: [] for at in slots}
        for item in rows:
            for at, part in zip(slots, item[head:].split([*lengths.values()]), strict=True):
                self._parts[at].append(part)
        finite = [
            self.numbers(part, slots[at].values).isfinite().all()
            for at in self._touched
            for part in self._parts[at]
        ]
        return not finite or bool(torch.stack(finite).all())

    def store(self, number: int, slot: TensorSlot, residual: Tensor | None) -> None:
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


# ---- The compressed gradients of an optimizer: which are, when, and what is left out of them -----------


METHODS: dict[type[StatefulCompression], type[Method]] = {
    PowerSGD: PowerSGDMethod,
    TopK: TopKMethod,
    OneBit: OneBitMethod,
    Int8: QuantisedMethod,
    Fp8: QuantisedMethod,
}


class Agreement:
    """Makes the number of exchanges, which a new rank does not know, equal on all ranks.

    It compares their compressions, too.
    """

    def __init__(self, state: CompressionState, scope: CollectiveScope) -> None:
        self._state = state
        name = scope.derived("(number of exchanges)").name
        self._comparison = Comparison(scope.context, Call(name, scope.process_set.number(scope.context)), 2)

    def start(self) -> None:
        """Starts it, on all ranks."""
        self._comparison.start([self._state.exchanges, checksum_of_text(repr(self._state.compression))])

    def finish(self) -> None:
        """Waits for it, if it has been started.

        Raises:
            ValueError: the ranks have different compressions.
        """
        if not self._comparison.is_open:
            return
        outcome = self._comparison.finish()
        assert outcome is not None  # it is new on every rank
        self._state.exchanges = outcome.largest[0]
        if not outcome.equal[1]:
            raise ValueError(
                f"the ranks have given this optimizer different compressions, this one "
                f"{self._state.compression!r}: give all of them the same"
            )

    def discard(self) -> None:
        """Ends it, whether it has succeeded or not."""
        self._comparison.discard()


class CompressedGradients(Stage):
    """The exchange of compressed gradients, by the numbers of their parameters.

    They are exchanged at the end of a pass, all together. The first round of a world, and the first after a
    join, is exact: there the ranks agree on the number of exchanges, which a new rank does not know.
    """

    def __init__(
        self, state: CompressionState, options: ExchangeOptions, named: Sequence[NamedParameter]
    ) -> None:
        super().__init__(options, named)
        self._state, scope = state, self._scope.derived("(compressed)")
        self._method = METHODS[type(state.compression)](state, Link(scope, self._how))
        compressed = [
            at for at, parameter in enumerate(self._parameters) if self._method.compresses(parameter)
        ]
        self._compressed = dict.fromkeys(compressed)
        self._agreement = Agreement(state, scope)
        self._joins = joins_of(self._context, self._set_number)
        self._agreed_joins: int | None = None  # number of joins at the last agreement
        self._has_begun = False
        self._compresses = False  # in this round
        self._new: dict[int, None] = {}
        self._slots: dict[int, TensorSlot] = {}
        self._phased: PhasedExchange[bool] | None = None

    @property
    def is_open(self) -> bool:
        return self._has_begun

    def start(self, indices: list[int], absent: bool) -> list[int]:
        self._begin_round()
        if not self._compresses or self._compressed.keys().isdisjoint(indices):
            return indices
        if not absent:
            self._new.update((at, None) for at in indices if at in self._compressed)
        return [at for at in indices if at not in self._compressed]

    def start_rest(self) -> None:
        self._begin_round()
        if not self._compresses or self._phased is not None or not self._compressed:
            return
        self._state.follow_scale()
        with torch.no_grad():
            self._slots = {at: self._slot(at) for at in self._compressed}
        self._phased = self._method.start(self._slots)

    def finish(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        """Waits for the compressed gradients, and puts them in place.

        If any gradient is not finite, the step will not be taken, so what was left out before stays as it
        was.

        Raises:
            HorovodInternalError: an exchange failed.
            ValueError: the ranks have different compressions.
        """
        self._agreement.finish()
        if self._phased is not None:
            is_finite = self._phased.wait() and _are_finite(reduced)
            with torch.no_grad():
                for slot in self._method.end(self._slots, keeps=is_finite):
                    gradient = slot.parameter.grad
                    dimensions = gradient.sparse_dim() if gradient is not None and gradient.is_sparse else 0
                    store_gradient(slot.parameter, gradient, slot.values, dimensions)
        self.discard()
        return []

    def discard(self) -> None:
        if self._phased is not None:
            self._phased.drop()
        self._agreement.discard()
        self._phased, self._has_begun, self._compresses = None, False, False
        self._new, self._slots = {}, {}

    def _begin_round(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        state = self._state
        is_agreed, self._agreed_joins = self._joins.count == self._agreed_joins, self._joins.count
        self._compresses = is_agreed and state.exchanges >= state.compression.start
        state.exchanges += 1
        if not is_agreed:
            self._agreement.start()

    def _slot(self, number: int) -> TensorSlot:
        """Returns this rank's gradient plus what was left out; in the gradient's own memory if possible."""
        parameter, is_new = self._parameters[number], number in self._new
        dtype, gradient = compute_dtype(parameter.dtype), parameter.grad
        residual = self._state.residual(parameter, dtype)
        if gradient is None:
            values = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        elif is_new and _is_plain(gradient, dtype):
            values = gradient.detach()
        else:
            dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            values = torch.empty(parameter.shape, dtype=dtype, device=parameter.device).copy_(dense)
        if residual is not None:
            values += residual
        return TensorSlot(parameter, values, is_new)


def _is_plain(gradient: Tensor, dtype: torch.dtype) -> bool:
    return (
        gradient.layout is torch.strided
        and gradient.dtype == dtype
        and gradient.is_contiguous()
        and not shares_elements(gradient)
        and not gradient.is_neg()
    )


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    checked = [(tensor._values() if tensor.is_sparse else tensor).isfinite().all() for tensor in tensors]
    return not checked or bool(torch.stack(checked).all())
