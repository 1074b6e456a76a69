"""Values that must be equal on all ranks during a call, and the report of the first difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sirtaki.bindings.context import Context
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.process_sets import global_process_set
from sirtaki.common.training.consistency import Scope, checksum_of_text, combined, compared


class Value(NamedTuple):
    """A value as it is compared.

    Attributes:
        label: its name in messages.
        kind: its type, and what else of it a message can show.
        checksum: of its elements; 0 if its kind says all.
    """

    label: str
    kind: str
    checksum: int = 0


class _Report(NamedTuple):
    rank: int
    values: Sequence[Value]
    refusal: str | None


def require_equal(
    context: Context, name: str, values: Sequence[Value], refusal: str | None, advice: str
) -> None:
    """Raises on all ranks if a value differs between ranks, or if any rank refuses the call.

    A single all-reduce of a few bytes; more communication only if it raises.

    Args:
        context: this rank.
        name: identifies the comparison on all ranks.
        values: this rank's, in an order that is the same on all ranks.
        refusal: why this rank refuses the call; None: it does not.
        advice: the end of the message about a difference.

    Raises:
        ValueError: on all ranks; the text names the value and a rank that has another than the others.
    """
    if context.size > 1:
        scope = Scope(context, global_process_set, name, advice)
        numbers = [
            number for label, kind, known in values for number in (checksum_of_text(label + kind), known)
        ]
        if not all(compared(scope, [combined([checksum_of_text(repr(refusal)), *numbers])])):
            mine = _Report(context.rank, values, refusal)
            reports: list[_Report] = gather_objects(context, mine, f"{name}.reports", global_process_set)
            raise ValueError(_difference(scope, reports))
    if refusal is not None:
        raise ValueError(refusal)


def _difference(scope: Scope, reports: Sequence[_Report]) -> str:
    for report in reports:
        if report.refusal is not None:
            return f"on {scope.label(report.rank)}: {report.refusal}"
    counts = Counter(tuple(report.values) for report in reports)
    base = max(reports, key=lambda report: (counts[tuple(report.values)], -report.rank))
    other = next(report for report in reports if report.values != base.values)
    ours, theirs = scope.label(base.rank), scope.label(other.rank)
    for item, another in zip(base.values, other.values, strict=False):
        if item.label != another.label:
            break
        if item.kind != another.kind:
            return f"{item.label} is {another.kind} on {theirs} and {item.kind} on {ours}; {scope.remedy}"
        if item != another:
            return f"{item.label} has other values on {theirs} than on {ours}; {scope.remedy}"
    return (
        f"{theirs} has {', '.join(value.label for value in other.values) or 'nothing'}, and {ours} has "
        f"{', '.join(value.label for value in base.values) or 'nothing'}; {scope.remedy}"
    )
