"""How the ranks' values of a root become its values over the whole batch.

A rule belongs to the code that computes the root. The proof keeps those rules whose results on the ranks'
values were the values of the whole batch. If several are left, they have to agree on later values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.torch.auto.job import LoadedBatch, Root, job
from sirtaki.torch.ops.collectives import allgather

LARGEST = 1 << 14  # elements of a root: a matrix of 128 by 128 classes

# Functions of the values of the ranks that have rows, float64 of shape [ranks, elements], and of the numbers
# of rows, [ranks, 1].
_RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda values, rows: (values * rows).sum(0) / rows.sum(),
    "sum": lambda values, rows: values.sum(0),
    "max": lambda values, rows: values.amax(0),
    "min": lambda values, rows: values.amin(0),
}
# The rule of a function, where the values do not tell: counts that were all 0, for example.
BY_NAME = {
    "sum": "sum", "count_nonzero": "sum", "nansum": "sum", "mean": "mean", "bincount": "sum",
    "index_add_": "sum", "index_put_": "sum", "scatter_add_": "sum",
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


def flat(values: Tensor) -> Tensor:
    """Returns the elements of a tensor as float64."""
    return values.detach().double().flatten()


def narrow(root: Root, parts: Sequence[Tensor], rows: Sequence[int], is_of_all_rows: bool) -> None:
    """Keeps the rules that compute a root's values over the whole batch from its values over the parts.

    If the values do not tell which, a root of some of the rows has no rule: the name of its function, which
    would choose later, holds for all rows. `logits[:4].sum()`, which is 0 now, is no sum over the ranks.
    """
    shape = root.value.shape
    if any(part.shape != shape for part in parts) or job.shapes.get(root.key, shape) != shape:
        job.rules[root.key] = frozenset()
        return
    whole = flat(root.value)
    if whole.isnan().any():  # as every rule's result is, so none of them is verified
        return
    values, counts = torch.stack([flat(part) for part in parts]), _column(rows)
    bound = tolerance(root.value.dtype) * max(1e-30, _largest(values), _largest(whole))
    known = job.rules.get(root.key, _candidates(root))
    kept = frozenset(rule for rule in known if _agree(_RULES[rule](values, counts), whole, bound))
    job.rules[root.key] = kept if is_of_all_rows or len(kept) == 1 else frozenset()
    job.shapes[root.key] = shape


def _column(rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).unsqueeze(1)


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _candidates(root: Root) -> frozenset[str]:
    if root.is_row:
        return frozenset()
    if root.is_ragged and BY_NAME.get(root.key[0], "mean") == "mean":
        return frozenset()  # the ranks select other numbers of rows, which their mean does not show
    return frozenset(_RULES if root.key[0] in _EXTREMES else ("mean", "sum"))


def _agree(first: Tensor, second: Tensor, bound: float) -> bool:
    return torch.allclose(first, second, rtol=0, atol=bound, equal_nan=True)


def gather(batch: LoadedBatch) -> None:
    """Exchanges the roots that have been computed since the last exchange. All ranks call it together."""
    pending = batch.roots[batch.gathered :]
    batch.gathered = len(batch.roots)
    if not pending or not batch.is_part:
        return
    shapes = [job.shapes.get(root.key, torch.Size()) for root in pending]
    mine = torch.cat([_sent(root, shape) for root, shape in zip(pending, shapes, strict=True)])
    table: Tensor = allgather(mine.unsqueeze(0), name="auto.scalars")
    counts = batch.share.counts
    table, rows = table[[count > 0 for count in counts]], _column([count for count in counts if count])
    columns = table.split([1 + shape.numel() for shape in shapes], dim=1)
    for root, shape, column in zip(pending, shapes, columns, strict=True):
        root.has_one_shape = bool(column[:, 0].all())
        found = _decided(root, column[:, 1:], rows) if root.has_one_shape else None
        root.whole = None if found is None else found.view(shape)


def _sent(root: Root, shape: torch.Size) -> Tensor:
    """Returns whether a root has its shape of the proof, and its elements or, if not, zeros."""
    if root.value.shape != shape:
        return torch.zeros(1 + shape.numel(), dtype=torch.float64)
    return torch.cat([torch.ones(1, dtype=torch.float64), flat(root.value)])


def _decided(root: Root, values: Tensor, rows: Tensor) -> Tensor | None:
    rules = job.rules.get(root.key, frozenset())
    results = {rule: combine(values, rows) for rule, combine in _RULES.items() if rule in rules}
    if not results:
        return None
    first = next(iter(results.values()))
    bound = tolerance(root.value.dtype) * _largest(values)
    if not all(_agree(result, first, bound) for result in results.values()):
        preferred = BY_NAME.get(root.key[0], "")
        if preferred not in results:
            return None
        first = results[preferred]
    elif "mean" in results:
        first = results["mean"]
    if not root.value.dtype.is_floating_point and not bool((first == first.round()).all()):
        return None
    return first.to(root.value)


def whole(batch: LoadedBatch, root: Root) -> Tensor:
    """Returns a root's values over the whole batch.

    Raises:
        UnsupportedError: it is not known how they follow from those of the ranks.
    """
    if root.whole is None:
        gather(batch)
    if root.whole is None:
        from sirtaki.torch.auto.arguments import difference, is_unseen

        why = "it is neither their mean over rows, nor their sum, largest or smallest"
        if not root.has_one_shape:
            why = "its shape depends on the rows of each rank; give it a fixed shape, as by minlength="
        if is_unseen(root):
            never = "this line was not part of a batch that was computed as a whole and in parts"
            why = difference(root) or never
        raise UnsupportedError(
            f"{root.line}: {root.key[0]} computes {root.kind} from the rows of a batch, and its value over "
            f"the whole batch does not follow from those of the ranks' parts: {why}. Compute it in each step "
            "as a sum or a mean over rows, or outside of the training loop; or use @hvd.consistent with out="
        )
    return root.whole
