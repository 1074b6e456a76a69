"""Values that must be equal on all ranks, such as parameters: checksums detect differences, a report names
them.

An adapter presents its tensors as `Tensors`, and an optimizer's hyper-parameters as plain values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.process_sets import ProcessSet
from sirtaki.common.ops.reduction import Call
from sirtaki.common.training.checksums import Comparison, checksum_of_text, combined

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
    comparison = Comparison(scope.context, scope.call(), 1)
    comparison.start([combined([checksum_of_tensors(tensors), checksum_of_text(repr(options))])])
    outcome = comparison.finish()
    if outcome is None or all(outcome.equal):
        return
    if finding := find_difference(scope, tensors, options):
        raise ParametersDifferError(str(finding))


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
