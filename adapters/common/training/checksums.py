"""Checksums of tensors, and an operation that compares a few numbers over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from struct import pack
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from sirtaki.bindings.context import Context
from sirtaki.bindings.library import dtypes, ffi
from sirtaki.bindings.request import ABSENT, ALLREDUCE, MAX, Batch
from sirtaki.common.ops.reduction import Call, Reduction, describe
from sirtaki.common.ops.tensor import DTYPE_CODES, ROW_MAJOR, TensorView

_BYTES = {dtype.code: dtype.size for dtype in dtypes()}
_INT64 = DTYPE_CODES["int64"]
_LEAST = -(1 << 63)


def checksum(view: TensorView) -> int:
    """Returns the 64-bit XXH3 of a tensor's dtype, shape and bytes, which are read in place.

    The tensor has to be row-major, and in CPU memory.
    """
    kind = xxh3_64_intdigest(f"{view.dtype} {tuple(view.shape)}".encode())
    size = prod(view.shape) * _BYTES[view.dtype]
    return xxh3_64_intdigest(ffi.buffer(ffi.cast("char *", view.pointer), size), kind) if size else kind


def checksum_of_text(text: str) -> int:
    """Returns the 64-bit XXH3 of a text."""
    return xxh3_64_intdigest(text.encode())


def combined(checksums: Iterable[int]) -> int:
    """Returns the 64-bit XXH3 of checksums in their order."""
    numbers = list(checksums)
    return xxh3_64_intdigest(pack(f"<{len(numbers)}Q", *numbers))


def _pair(number: int | None) -> tuple[int, int]:
    """Returns a number and its complement, signed; for None, two values that change no maximum."""
    if number is None:
        return _LEAST, _LEAST
    signed = number - (number >> 63 << 64)
    return signed, ~signed


class Outcome(NamedTuple):
    """The result of a comparison, the same on all ranks.

    Attributes:
        equal: for each number, whether it is equal on all ranks that have compared theirs.
        largest: the maximum of each number.
        smallest: the minimum of each number.
        is_shared: whether more than one rank has compared its numbers; ranks that have joined do not compare.
        marks: the maximum of each mark.
    """

    equal: Sequence[bool]
    largest: Sequence[int]
    smallest: Sequence[int]
    is_shared: bool
    marks: Sequence[int]


class Comparison:
    """A comparison of 64-bit numbers over the ranks of a set: an all-reduce of their maxima and minima.

    All ranks take part in each comparison; it costs no message if no rank has news.

    Attributes:
        marks: further numbers of this rank by index, of which all ranks learn the maximum; none once sent.
    """

    def __init__(self, context: Context, call: Call, count: int, marks: int = 0) -> None:
        self.is_open = False
        self._last_numbers: Sequence[int | None] | None = None  # the contents of the memory, if known
        self._context = context
        self._batch = Batch(1)
        # For each number: this rank's value and its complement, whose maximum gives the minimum. Then marks.
        self._pairs_end = 2 * (count + 1)
        self._length = self._pairs_end + marks
        self._values = ffi.new("int64_t[]", self._length)
        self.marks: dict[int, int] = {}
        address = int(ffi.cast("uintptr_t", self._values))
        view = TensorView(address, (self._length,), _INT64, ROW_MAJOR, self._values)
        describe(self._batch, ALLREDUCE, view, address, call, how=Reduction(MAX))

    def start(
        self, numbers: Sequence[int | None], *, is_new: bool = True, position: int | None = None
    ) -> None:
        """Queues a comparison. If no rank has news, nothing is compared and nothing is sent; marks are news.

        A number that this rank does not know, None, differs from no other. A `position` takes the place of
        the last number, cheaply: it may change in each comparison.
        """
        has_marks = bool(self.marks)
        if has_marks or numbers != self._last_numbers:
            self._write(numbers)
        if position is not None:
            at = 2 * (len(numbers) - 1)
            self._values[at], self._values[at + 1] = position, ~position
        self._batch.set_flags(0, 0 if is_new or has_marks else ABSENT)
        self._batch.keepalive[0] = self._values
        self._context.enqueue(self._batch)
        self.is_open = True

    def _write(self, numbers: Sequence[int | None]) -> None:
        pairs = list(map(_pair, (*numbers, self._context.rank)))
        marks = [0] * (self._length - self._pairs_end)
        for index, mark in self.marks.items():
            marks[index] = mark
        self._values[0 : self._length] = [*(value for pair in pairs for value in pair), *marks]
        self._last_numbers, self.marks = numbers, {}

    def finish(self) -> Outcome | None:
        """Waits for the comparison that was started; returns None if no rank had news.

        Raises:
            HorovodInternalError: it failed; it then stays open until `discard`.
        """
        self._context.wait(self._batch)
        is_untouched = self._context.untouched(self._batch)
        outcome, last = (None, self._last_numbers) if is_untouched else (self._outcome(), None)
        self.discard()
        self._last_numbers = last
        return outcome

    def _outcome(self) -> Outcome:
        values = list(self._values)
        values, marks = values[: self._pairs_end], values[self._pairs_end :]
        largest, complements = values[0::2], values[1::2]
        pairs = zip(largest, complements, strict=True)
        equal = [high == ~low or high == low == _LEAST for high, low in pairs]
        smallest = [~low for low in complements]
        return Outcome(equal[:-1], largest[:-1], smallest[:-1], not equal[-1], marks)

    def discard(self) -> None:
        """Drops a comparison that has ended, successfully or not."""
        if self.is_open:
            self._context.release(self._batch)
            self._last_numbers = None
        self.is_open = False
