"""How the ranks' values of a scalar become the value over the whole batch.

A rule belongs to the code that computes the scalar. The proof keeps those rules whose result on the ranks'
values was the value of the whole batch. If several are left, they have to agree on later values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.torch.auto.job import LoadedBatch, Root, job
from sirtaki.torch.ops.collectives import allgather

Values = Sequence[tuple[float, int]]  # of the ranks that have rows: value and rows


def _mean(values: Values) -> float:
    return math.fsum(value * rows for value, rows in values) / sum(rows for _, rows in values)


_RULES: dict[str, Callable[[Values], float]] = {
    "mean": _mean,
    "sum": lambda values: math.fsum(value for value, _ in values),
    "max": lambda values: max(value for value, _ in values),
    "min": lambda values: min(value for value, _ in values),
}
# The rule of a function, where the values do not tell: counts that were all 0, for example.
_BY_NAME = {
    "sum": "sum", "count_nonzero": "sum", "nansum": "sum", "mean": "mean",
    "max": "max", "amax": "max", "any": "max", "min": "min", "amin": "min", "all": "min",
}  # fmt: skip
# The largest or smallest value of the parts is often that of one row, or the median, by chance.
_EXTREMES = {
    "max",
    "amax",
    "any",
    "min",
    "amin",
    "all",
    "aminmax",
    "maximum",
    "minimum",
    "norm",
    "vector_norm",
}
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 5e-2  # of 16-bit dtypes


def tolerance(dtype: torch.dtype) -> float:
    """Returns how much two ways to compute a value may differ, relative to it."""
    return _TOLERANCE.get(dtype, _COARSE) if dtype.is_floating_point else 0.0


def narrow(root: Root, values: Values) -> None:
    """Keeps the rules that compute a scalar's value over the whole batch from its values over the parts."""
    whole = float(root.value)
    if math.isnan(whole):  # as every rule's result is, so none of them is verified
        return
    bound = tolerance(root.value.dtype) * max(1e-30, *(abs(value) for value, _ in values), abs(whole))
    known = job.rules.get(root.key, _candidates(root))
    job.rules[root.key] = frozenset(rule for rule in known if _agree(_result(rule, values), whole, bound))


def _candidates(root: Root) -> frozenset[str]:
    if root.is_row:
        return frozenset()
    if root.is_ragged and _BY_NAME.get(root.key[0], "mean") == "mean":
        return frozenset()  # the ranks select other numbers of rows, which their mean does not show
    return frozenset(_RULES if root.key[0] in _EXTREMES else ("mean", "sum"))


def _result(rule: str, values: Values) -> float:
    if any(math.isnan(value) for value, _ in values):
        return math.nan
    try:
        return _RULES[rule](values)
    except (OverflowError, ValueError):  # sums of infinities
        return math.nan


def _agree(first: float, second: float, bound: float) -> bool:
    return first == second or abs(first - second) <= bound or (math.isnan(first) and math.isnan(second))


def gather(batch: LoadedBatch) -> None:
    """Exchanges the roots that have been computed since the last exchange. All ranks call it together."""
    pending = batch.roots[batch.gathered :]
    batch.gathered = len(batch.roots)
    if not pending or not batch.is_part:
        return
    mine = torch.tensor([[float(root.value) for root in pending]], dtype=torch.float64)
    table: list[list[float]] = allgather(mine, name="auto.scalars").tolist()
    counts = batch.share.counts
    for index, root in enumerate(pending):
        values = [(row[index], rows) for row, rows in zip(table, counts, strict=True) if rows]
        root.whole = _decided(root, values)


def _decided(root: Root, values: Values) -> Tensor | None:
    rules = job.rules.get(root.key, frozenset())
    results = {rule: _result(rule, values) for rule in _RULES if rule in rules}
    if not results:
        return None
    first = next(iter(results.values()))
    bound = tolerance(root.value.dtype) * max(abs(value) for value, _ in values)
    if not all(_agree(result, first, bound) for result in results.values()):
        preferred = "mean" if root.requires_grad else _BY_NAME.get(root.key[0], "")
        if preferred not in results:
            return None
        first = results[preferred]
    elif "mean" in results:
        first = results["mean"]
    if not root.value.dtype.is_floating_point and not (math.isfinite(first) and first == round(first)):
        return None
    return torch.as_tensor(first, dtype=torch.float64).to(root.value)


def whole(batch: LoadedBatch, root: Root) -> Tensor:
    """Returns a scalar's value over the whole batch.

    Raises:
        UnsupportedError: it is not known how it follows from those of the ranks.
    """
    if root.whole is None:
        gather(batch)
    if root.whole is None:
        from sirtaki.torch.auto.arguments import difference, is_unseen

        why = "it is neither their mean over rows, nor their sum, largest or smallest"
        if is_unseen(root):
            never = "this line was not part of a batch that was computed as a whole and in parts"
            why = difference(root) or never
        raise UnsupportedError(
            f"{root.line}: {root.key[0]} computes a scalar from the rows of a batch, and its value over the "
            f"whole batch does not follow from those of the ranks' parts: {why}. Compute it in each step as "
            "a sum or a mean over rows, or outside of the training loop; or use @hvd.consistent with out="
        )
    return root.whole
