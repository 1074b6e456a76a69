"""The exchange by which all ranks get the arrays of rank 0, and make sure that they have them.

The names of all operations begin with "elastic.", which separates them from the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.common.checksums import Comparison, combined
from sirtaki.common.consistency import Scope, find_difference
from sirtaki.common.handles import Operation, pooled_batch, run
from sirtaki.common.hints import hint
from sirtaki.common.objects import gather_objects
from sirtaki.common.ops import Call, describe
from sirtaki.common.process_sets import global_process_set
from sirtaki.numpy.arrays import Array, row_major_view
from sirtaki.numpy.consistency import checksum_of
from sirtaki.numpy.elastic.entries import Descriptions, Entry

_NAME = "elastic.arrays"
_GROUP_BYTES = 64 << 20  # sent together; bounds the memory of ranks that take part without needing anything


def agree(context: Context, entries: Sequence[Entry], arrays: Sequence[Array] | None = None) -> bool:
    """Compares descriptions over the ranks, and the arrays if they are given. All ranks call it alike.

    Returns:
        Whether the arrays are equal on all ranks; True if none are given.

    Raises:
        ParametersDifferError: names, dtypes or shapes differ. All ranks raise it, with the same text.
    """
    described = Descriptions(entries)
    comparison = Comparison(context, Call(f"{_NAME}.check"), 2)
    values = combined([] if arrays is None else map(checksum_of, arrays))
    comparison.start([described.checksum(), values])
    outcome = comparison.finish()
    if outcome is None or all(outcome.equal):
        return True
    if not outcome.equal[0]:
        scope = Scope(context, global_process_set, _NAME, "hvd.elastic.run")
        finding = find_difference(scope, described)
        raise ParametersDifferError(str(finding or "the ranks' states hold different arrays"))
    return False


def receive(
    context: Context, entries: Sequence[Entry], sources: Sequence[Array], is_needed: bool
) -> list[Array]:
    """Sends rank 0's arrays to the ranks that need them. All ranks call it.

    Args:
        context: this rank, in its new world.
        entries: described alike on all ranks.
        sources: on rank 0, its arrays, which are only read. Ignored elsewhere.
        is_needed: whether this rank needs the arrays; False on rank 0.

    Returns:
        New arrays, in the order of entries, if they are needed; else an empty list.
    """
    received: list[Array] = []
    for group in _groups(entries):
        if context.rank == 0:
            own = [sources[index] for index in group]
        else:
            own = [np.empty(entries[index].shape, entries[index].dtype) for index in group]
        _broadcast(context, [f"{_NAME}.{index}.{entries[index].name}" for index in group], own)
        if is_needed:
            received += own
    return received


def _groups(entries: Sequence[Entry]) -> Iterator[list[int]]:
    group: list[int] = []
    size = 0
    for index, entry in enumerate(entries):
        group.append(index)
        size += int(np.prod(entry.shape)) * entry.dtype.itemsize
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _broadcast(context: Context, names: Sequence[str], arrays: Sequence[Array]) -> None:
    """Overwrites the arrays by those of rank 0, which stay unchanged there."""
    batch = pooled_batch(len(arrays))
    views = [row_major_view(array) for array in arrays]
    for index, (name, view) in enumerate(zip(names, views, strict=True)):
        describe(batch, core.BROADCAST, view, view.pointer, Call(name), index, root=0)
    run(context, Operation(batch, views, lambda *_: None))


def repair(context: Context, entries: Sequence[Entry], arrays: Sequence[Array]) -> dict[int, Array]:
    """Finds the arrays that are not as on rank 0, and fetches those. All ranks call it, after `agree`.

    One rank warns, with the array's name and the largest difference.

    Returns:
        The right arrays by index, those that differ on this rank only.

    Raises:
        ParametersDifferError: an array still differs after it has been sent; on all ranks.
    """
    checksums = [checksum_of(array) for array in arrays]
    gathered: list[list[int]] = gather_objects(context, checksums, f"{_NAME}.checksums", global_process_set)
    different = [
        index for index in range(len(entries)) if any(one[index] != gathered[0][index] for one in gathered)
    ]
    sources = [arrays[index] for index in different]
    fetched = receive(context, [entries[index] for index in different], sources, context.rank != 0)
    right = dict(zip(different, fetched or sources, strict=True))
    _report(context, entries, {index: _difference(arrays[index], right[index]) for index in different})
    now = [right.get(index, array) for index, array in enumerate(arrays)]
    if not agree(context, entries, now):
        raise ParametersDifferError(
            f"{entries[different[0]].name!r} still differs between the ranks after rank 0 has sent it: "
            "memory or a connection of one of the ranks is damaged"
        )
    return {index: array for index, array in right.items() if checksums[index] != gathered[0][index]}


def _report(context: Context, entries: Sequence[Entry], differences: dict[int, float]) -> None:
    gathered = gather_objects(context, differences, f"{_NAME}.differences", global_process_set)
    if context.rank != 0 or not differences:
        return
    scope = Scope(context, global_process_set, _NAME, "")
    parts = []
    for index in differences:
        rank = max(range(context.size), key=lambda rank: gathered[rank][index])
        parts.append(f"{entries[index].name!r} on {scope.label(rank)} (by up to {gathered[rank][index]:.3g})")
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    hint(
        f"after a change of the ranks, arrays were not as on rank 0, whose values replace them: "
        f"{', '.join(parts[:3])}{more}"
    )


def _difference(own: Array, right: Array) -> float:
    """Returns the largest difference of two elements; infinity if one of them is not a number."""
    if own.tobytes() == right.tobytes():
        return 0.0
    wide: Any = np.complex128 if own.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        differences = np.abs(own.astype(wide) - right.astype(wide))
    differences = np.where(own == right, 0.0, np.nan_to_num(differences, nan=np.inf, posinf=np.inf))
    return float(differences.max(initial=0.0))
