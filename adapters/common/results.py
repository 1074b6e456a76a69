"""The combination of what the ranks have computed from their rows into the result for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sirtaki.common.checksums import checksum_of_text
from sirtaki.common.equal_values import Value
from sirtaki.common.objects import gather_objects
from sirtaki.common.process_sets import global_process_set
from sirtaki.common.shares import Share
from sirtaki.common.trees import PLAIN, Library, Path, dtype_of, kind_of

MEAN, SUM, ROWS, SAME = RULES = ("mean", "sum", "rows", "same")


class LeafRule(NamedTuple):
    """The rule for one leaf of a result, and what of the leaf has to be equal on all ranks."""

    name: str
    value: Value


class _Refused(ValueError):
    """A leaf cannot be combined; the text says why."""


def rules_of(library: Library, result: Any, out: Any, share: Share) -> tuple[list[LeafRule], str | None]:
    """Returns the rule of each leaf of a result, and why the result is refused; None: it is not."""
    leaves = library.flatten(result)[0]
    try:
        given = _given(library, result, [path for path, _ in leaves], out)
        return [
            _rule(library, leaf, f"result{library.text(path)}", name, share)
            for (path, leaf), name in zip(leaves, given, strict=True)
        ], None
    except _Refused as refusal:
        return [], str(refusal)


def _given(library: Library, result: Any, paths: Sequence[Path], out: Any) -> list[str | None]:
    """Returns what `out` says for each leaf: a string stands for all that is below it."""
    names: list[str | None] = [None] * len(paths)
    for prefix, name in [] if out is None else library.flatten(out)[0]:
        if name is None:
            continue
        if name not in RULES:
            raise _Refused(
                f'out{library.text(prefix)} is {name!r}, and it has to be "mean", "sum", "rows" or "same"'
            )
        below = [index for index, path in enumerate(paths) if path[: len(prefix)] == prefix]
        if not below and not _exists(library, result, prefix):
            known = ", ".join(f"result{library.text(path)}" for path in paths)
            raise _Refused(
                f"out{library.text(prefix)} says {name!r}, but the result has no such part; it has: {known}"
            )
        for index in below:
            names[index] = name
    return names


def _exists(library: Library, tree: Any, path: Path) -> bool:
    """Returns whether a path leads to a part of a result, which may be an empty one."""
    for key in path:
        if library.is_array(tree) or isinstance(tree, PLAIN):
            return False
        try:
            name = getattr(key, "name", None)
            tree = (
                tree[getattr(key, "idx", getattr(key, "key", None))] if name is None else getattr(tree, name)
            )
        except (AttributeError, LookupError, TypeError):
            return False
    return True


def _rule(library: Library, leaf: Any, label: str, name: str | None, share: Share) -> LeafRule:
    is_array = library.is_array(leaf)
    if not is_array and not isinstance(leaf, PLAIN):
        raise _Refused(
            f"{label} is a {type(leaf).__name__}, which can neither be combined nor compared over the ranks; "
            "return tensors, numbers and texts"
        )
    kind = kind_of(leaf) if is_array else type(leaf).__name__
    is_floating = library.is_floating(leaf) if is_array else isinstance(leaf, float | complex)
    if name is None:
        is_count = isinstance(leaf, int) and not isinstance(leaf, bool)  # equal on all ranks only by chance
        name = _default(label, kind, is_array or is_count, is_floating and not (is_array and leaf.shape))
    if name == MEAN and not is_floating:
        raise _Refused(f'{label} is {kind}, and out says "mean", which floating numbers have; {_WRITE}')
    if name == SUM and ("bool" in kind or not (is_array or isinstance(leaf, int | float | complex))):
        raise _Refused(f'{label} is {kind}, and out says "sum", which numbers have; {_WRITE}')
    if name == ROWS and not (is_array and leaf.shape and leaf.shape[0] == share.count):
        raise _Refused(
            f'{label} is {kind}, and out says "rows", but the function was given {share.count} rows here and '
            f"would have to return as many; {_WRITE}"
        )
    if name == ROWS:
        kind = f"{dtype_of(leaf)} with rows of shape {list(leaf.shape[1:])}"
    if name == SAME:
        known = library.checksum(leaf) if is_array else checksum_of_text(repr(leaf))
        return LeafRule(name, Value(label, kind if is_array else f"{leaf!r:.100}", known))
    return LeafRule(name, Value(label, kind))


_WRITE = (
    'write in out= how the ranks\' results make one: "mean" (weighted by rows), "sum", "rows" (one after the '
    'other) or "same" (equal on all ranks)'
)


def _default(label: str, kind: str, is_of_rows: bool, is_floating_scalar: bool) -> str:
    if is_floating_scalar:
        return MEAN
    if not is_of_rows:
        return SAME
    raise _Refused(
        f"{label} is {kind}, computed from this rank's rows alone, and without out= only floating scalars "
        f"are combined, as means; {_WRITE}, as one text for all results or in the structure of the result"
    )


class Combination:
    """The exchange that combines results."""

    def __init__(self, library: Library, share: Share, name: str) -> None:
        self._library, self._share, self._name = library, share, name

    def of(self, result: Any, rules: Sequence[LeafRule]) -> Any:
        """Returns the combined result. All ranks have to call it with the same rules."""
        leaves, rebuild = self._library.flatten(result)
        combined = [leaf for _, leaf in leaves]
        arrays: dict[str, list[int]] = {name: [] for name in RULES}
        numbers: list[int] = []
        for index, rule in enumerate(rules):
            if self._library.is_array(combined[index]):
                arrays[rule.name].append(index)
            elif rule.name in (MEAN, SUM):
                numbers.append(index)
        self._put(combined, numbers, self._of_numbers([(rules[i].name, combined[i]) for i in numbers]))
        reduced = arrays[MEAN] + arrays[SUM]
        factors = [self._factor(rules[index].name) for index in reduced]
        if reduced:
            given = [combined[index] for index in reduced]
            self._put(combined, reduced, self._library.summed(given, factors, f"{self._name} (reduced)"))
        if rows := arrays[ROWS]:
            given = [combined[index] for index in rows]
            self._put(combined, rows, self._library.gathered(given, f"{self._name} (rows)"))
        for index in arrays[SAME]:
            combined[index] = self._library.without_gradient(combined[index])
        return rebuild(combined)

    @staticmethod
    def _put(combined: list[Any], indices: Sequence[int], results: Sequence[Any]) -> None:
        for index, result in zip(indices, results, strict=True):
            combined[index] = result

    def _factor(self, rule: str) -> float:
        return self._share.weight if rule == MEAN else float(self._share.count > 0)

    def _of_numbers(self, numbers: Sequence[tuple[str, Any]]) -> list[Any]:
        """Returns the combination of Python's numbers, which keep their type and precision."""
        if not numbers:
            return []
        name = f"{self._name} (numbers)"
        mine = [(self._factor(rule), number) for rule, number in numbers]
        of_ranks = gather_objects(self._share.context, mine, name, global_process_set)
        return [
            sum(number if factor == 1.0 else factor * number for factor, number in of_all if factor)
            for of_all in zip(*of_ranks, strict=True)
        ]
