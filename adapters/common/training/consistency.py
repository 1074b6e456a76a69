"""Values that must be equal on all ranks, such as parameters: checksums detect differences, a report names
them.

An adapter presents its tensors as `Tensors`, and an optimizer's hyper-parameters as plain values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from struct import pack
from typing import Any, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.bindings.library import dtypes, ffi
from sirtaki.bindings.request import ABSENT, ALLREDUCE, MAX, Batch
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import Call, Reduction, describe
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


def compared(scope: Scope, numbers: Sequence[int]) -> Sequence[bool]:
    """Compares numbers over the ranks now; returns, for each, whether it is equal. All ranks call it."""
    comparison = Comparison(scope.context, scope.call(), len(numbers))
    comparison.start(numbers)
    outcome = comparison.finish()
    assert outcome is not None  # the numbers are new on every rank
    return outcome.equal


# ---- Tensors that must be equal on all ranks, and the report of their differences ----------------------

_ROUNDING = (
    8  # units in the last place of a tensor's largest element: ranks may compute with other instructions
)
_MAX_NAMED = 3
_SAME_OPTIONS = (
    "give all ranks the same; a scheduler that looks at a loss or a metric has to be given its average over "
    "the ranks (hvd.allreduce), and a checkpoint that only one rank has loaded has to be broadcast"
)

Options = Sequence[Mapping[str, Any]]  # per parameter group: plain values by name


class Spread(NamedTuple):
    """The extent of the difference between ranks in a tensor.

    Attributes:
        difference: the largest difference between two ranks, over all elements.
        scale: the largest absolute value of any element on any rank.
        epsilon: the dtype's; 0 for integers.
    """

    difference: float
    scale: float
    epsilon: float

    @property
    def is_rounding(self) -> bool:
        return self.difference <= _ROUNDING * self.epsilon * self.scale


class Tensors(Protocol):
    """Tensors that must be equal on all ranks, as an adapter presents them."""

    def names(self) -> Sequence[str]:
        """Returns a name for each tensor, in an order that is the same on all ranks."""
        ...

    def kinds(self) -> Sequence[str]:
        """Describes the dtype and shape of each tensor, and every other property that must be equal."""
        ...

    def checksums(self) -> Sequence[int]:
        """Returns `sirtaki.common.training.checksums.checksum` of each tensor."""
        ...

    def spread(self, index: int) -> Spread:
        """Returns a tensor's spread over the ranks: all-reduces minimum and maximum, so all ranks call it."""
        ...


@dataclass(frozen=True)
class Scope:
    """The ranks over which a comparison runs.

    Attributes:
        context: this rank.
        process_set: the ranks that are compared.
        name: identifies the comparison on all ranks.
        remedy: the call that makes parameters equal, as a message shows it.
        data_advice: how a rank gets its own part of the data, as the end of a sentence.
        after_join: the remedy after a `join()`, if it differs from `remedy`.
    """

    context: Context
    process_set: ProcessSet
    name: str
    remedy: str
    data_advice: str = ""
    after_join: str = ""

    def call(self) -> Call:
        return Call(self.name, self.process_set.number(self.context))

    def label(self, rank: int) -> str:
        return self.context.topology.label(rank)


@dataclass(frozen=True)
class RankDifference:
    """A difference between ranks.

    Attributes:
        text: the tensors, values and ranks, equal on all ranks.
        advice: the remedy.
        is_rounding: whether the difference is so small that only rounding can explain it.
        is_scaling: whether the scaling of losses differs, which may have made parameters differ.
    """

    text: str
    advice: str
    is_rounding: bool = False
    is_scaling: bool = False

    def __str__(self) -> str:
        return f"{self.text}; {self.advice}"


class _Report(NamedTuple):
    """A rank's message to all other ranks once checksums have turned out to differ."""

    rank: int
    names: Sequence[str]
    kinds: Sequence[str]
    checksums: Sequence[int]
    options: Options
    scaling: Mapping[str, Any] | None


def checksum_of_tensors(tensors: Tensors) -> int:
    """Returns a single checksum of the tensors, and of their names and kinds."""
    description = repr((list(tensors.names()), list(tensors.kinds())))
    return combined([checksum_of_text(description), *tensors.checksums()])


def check(scope: Scope, tensors: Tensors, options: Options = ()) -> None:
    """Compares tensors over the ranks now: 8 bytes per rank, and more only if they differ. All ranks call it.

    Args:
        scope: the ranks, and a name for the exchange.
        tensors: the tensors that must be equal.
        options: hyper-parameters that must be equal, too.

    Raises:
        ParametersDifferError: on all ranks, with the same text, which names tensors and ranks.
    """
    whole = combined([checksum_of_tensors(tensors), checksum_of_text(repr(options))])
    if not all(compared(scope, [whole])) and (finding := find_difference(scope, tensors, options)):
        raise ParametersDifferError(str(finding))


class Descriptions:
    """Names and kinds without values, of what the ranks' states hold, in the form that is compared."""

    def __init__(self, entries: Sequence[tuple[str, str]]) -> None:
        self._entries = entries

    def names(self) -> Sequence[str]:
        return [name for name, _ in self._entries]

    def kinds(self) -> Sequence[str]:
        return [kind for _, kind in self._entries]

    def checksums(self) -> Sequence[int]:
        return [0] * len(self._entries)

    def spread(self, index: int) -> Spread:
        raise NotImplementedError("values are not compared here")


def states_agree(context: Context, name: str, entries: Sequence[tuple[str, str]], values: int = 0) -> bool:
    """Compares what the states of all ranks hold, by a single all-reduce. All ranks call it alike.

    Args:
        context: this rank.
        name: identifies the comparison on all ranks.
        entries: the name and kind of everything in this rank's state, in an order equal on all ranks.
        values: a checksum of what has to be equal besides.

    Returns:
        Whether the checksums of values are equal on all ranks.

    Raises:
        ParametersDifferError: the entries differ. All ranks raise it, with the same text.
    """
    scope = Scope(context, global_process_set, name, "hvd.elastic.run")
    have_equal_entries, have_equal_values = compared(scope, [checksum_of_text(repr(entries)), values])
    if not have_equal_entries:
        finding = find_difference(scope, Descriptions(entries))
        raise ParametersDifferError(str(finding or "the ranks' states hold different arrays"))
    return have_equal_values


def find_difference(
    scope: Scope, tensors: Tensors, options: Options = (), scaling: Mapping[str, Any] | None = None
) -> RankDifference | None:
    """Finds the differences between ranks, and their tensors: every rank that has not joined must call it."""
    names, kinds, found = tensors.names(), tensors.kinds(), tensors.checksums()
    mine = _Report(scope.context.rank, names, kinds, found, options, scaling)
    name = f"{scope.name}.differences"
    reports: list[_Report] = gather_objects(scope.context, mine, name, scope.process_set)
    base = _most_common(reports)
    if text := _names_differ(scope, base, reports) or _kinds_differ(scope, base, reports):
        return RankDifference(text, f"make them in the same way on all ranks, then call {scope.remedy}")
    if text := _options_differ(scope, base, reports):
        return RankDifference(text, _SAME_OPTIONS)
    if text := _scaling_differs(scope, reports):
        return RankDifference(text, _SAME_OPTIONS, is_scaling=True)
    return _tensors_differ(scope, tensors, base, reports)


def _most_common(reports: Sequence[_Report]) -> _Report:
    """Returns the report that most ranks agree on, from the lowest of them: the other ranks deviate."""
    counts = Counter(_key(report) for report in reports)
    return max(reports, key=lambda report: (counts[_key(report)], -report.rank))


def _key(report: _Report) -> str:
    return repr(report[1:-1])  # some ranks may not know the scaling


def _names_differ(scope: Scope, base: _Report, reports: Sequence[_Report]) -> str:
    for report in reports:
        if list(report.names) == list(base.names):
            continue
        more, less = (report, base) if set(report.names) - set(base.names) else (base, report)
        extra = [name for name in more.names if name not in less.names]
        if not extra:
            return f"ranks have their parameters in different orders: {_orders(scope, base, report)}"
        return (
            f"ranks have different parameters: {extra[0]!r} is on {scope.label(more.rank)} and not on "
            f"{scope.label(less.rank)}"
        )
    return ""


def _kinds_differ(scope: Scope, base: _Report, reports: Sequence[_Report]) -> str:
    for report in reports:
        for name, theirs, ours in zip(base.names, report.kinds, base.kinds, strict=True):
            if theirs != ours:
                return (
                    f"parameters differ between ranks: {name!r} is {theirs} on {scope.label(report.rank)} "
                    f"and {ours} on {scope.label(base.rank)}"
                )
    return ""


def _orders(scope: Scope, base: _Report, report: _Report) -> str:
    for name, other in zip(base.names, report.names, strict=False):
        if name != other:
            return f"{name!r} on {scope.label(base.rank)} is {other!r} on {scope.label(report.rank)}"
    return f"{len(base.names)} on {scope.label(base.rank)}, {len(report.names)} on {scope.label(report.rank)}"


def _options_differ(scope: Scope, base: _Report, reports: Sequence[_Report]) -> str:
    for report in reports:
        for group, (theirs, ours) in enumerate(zip(report.options, base.options, strict=False)):
            for option in sorted(theirs.keys() | ours.keys()):
                if repr(theirs.get(option)) != repr(ours.get(option)):
                    of_group = f" of parameter group {group}" if len(base.options) > 1 else ""
                    return (
                        f"optimizers differ between ranks: {option}{of_group} is {theirs.get(option)} on "
                        f"{scope.label(report.rank)} and {ours.get(option)} on {scope.label(base.rank)}"
                    )
    return ""


def _scaling_differs(scope: Scope, reports: Sequence[_Report]) -> str:
    known = [report for report in reports if report.scaling is not None]
    if not known:
        return ""
    counts = Counter(repr(report.scaling) for report in known)
    base = max(known, key=lambda report: (counts[repr(report.scaling)], -report.rank))
    for report in known:
        theirs, ours = report.scaling or {}, base.scaling or {}
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                return (
                    f"loss scaling differs between ranks: {name} is {theirs.get(name)} on "
                    f"{scope.label(report.rank)} and {ours.get(name)} on {scope.label(base.rank)}"
                )
    return ""


def _tensors_differ(
    scope: Scope, tensors: Tensors, base: _Report, reports: Sequence[_Report]
) -> RankDifference | None:
    outliers = {
        index: [report.rank for report in reports if report.checksums[index] != checksum]
        for index, checksum in enumerate(base.checksums)
    }
    spreads = {index: tensors.spread(index) for index, ranks in outliers.items() if ranks}
    if not spreads:
        return None
    significant = [index for index, spread in spreads.items() if not spread.is_rounding]
    named = (significant or list(spreads))[:_MAX_NAMED]
    parts = [
        f"{base.names[index]!r} on {scope.label(outliers[index][0])} is not as on {scope.label(base.rank)} "
        f"(by up to {spreads[index].difference:.3g})"
        for index in named
    ]
    remaining = len(significant or spreads) - len(named)
    more = f" and {remaining} more" if remaining > 0 else ""
    text = f"parameters differ between ranks: {', '.join(parts)}{more}"
    return RankDifference(text, f"call {scope.remedy} before training", not significant)
