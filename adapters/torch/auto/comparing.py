"""The comparison of a batch's gradients with those of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor

from sirtaki.common.ops import Sum
from sirtaki.common.shares import Share
from sirtaki.torch.auto.rules import tolerance
from sirtaki.torch.collectives import grouped_allreduce

_SMALL = 0.01  # of the norm of all gradients: a smaller gradient may differ more, relative to its own


class Difference(Enum):
    """The outcome of a comparison."""

    NONE = auto()
    UNKNOWN = auto()  # all gradients are zero, or not finite
    SUM = auto()  # the whole is the sum of the parts
    OTHER = auto()


def compare(wholes: Sequence[Tensor | None], parts: Sequence[Tensor | None], share: Share) -> Difference:
    """Compares the gradients of a whole batch with the mean over rows of the parts'. All ranks call it.

    The decision is the same on all ranks, because they exchange what they compare.
    """
    pairs = [
        (_dense(whole if whole is not None else torch.zeros_like(part)), part)  # type: ignore[arg-type]
        for whole, part in zip(wholes, parts, strict=True)
        if whole is not None or part is not None
    ]
    if not pairs:
        return Difference.UNKNOWN
    means = _combined(pairs, share.weight, share, "auto.mean")
    norms = [float(whole.double().norm()) for whole, _ in means]
    scale = math.sqrt(math.fsum(norm * norm for norm in norms))
    outcome = Difference.UNKNOWN
    if math.isfinite(scale) and scale:
        outcome = Difference.NONE if _are_close(means, norms, scale) else Difference.OTHER
    outcome = _worst(outcome)
    if outcome is Difference.OTHER:
        sums = _combined(pairs, 1.0, share, "auto.sum")
        if _are_close(sums, norms, scale):
            outcome = Difference.SUM
    return outcome


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()


def _combined(
    pairs: Sequence[tuple[Tensor, Tensor | None]], factor: float, share: Share, name: str
) -> list[tuple[Tensor, Tensor]]:
    """Returns the whole gradients, with the sums over ranks of the parts' times a factor."""
    scaled = []
    for whole, part in pairs:
        wide = torch.promote_types(whole.dtype, torch.float32)
        is_none = part is None or not share.count
        scaled.append(torch.zeros_like(whole, dtype=wide) if is_none else part.to(wide) * factor)  # type: ignore[union-attr]
    sums = grouped_allreduce(scaled, op=Sum, name=name)
    return [(whole, total) for (whole, _), total in zip(pairs, sums, strict=True)]


def _are_close(pairs: Sequence[tuple[Tensor, Tensor]], norms: Sequence[float], scale: float) -> bool:
    return all(
        float((whole.double() - total.double()).norm()) <= tolerance(whole.dtype) * (norm + _SMALL * scale)
        for (whole, total), norm in zip(pairs, norms, strict=True)
    )


def _worst(outcome: Difference) -> Difference:
    """Returns the outcome of the rank with the largest difference: rounding may tell ranks apart."""
    order = (Difference.NONE, Difference.UNKNOWN, Difference.OTHER)
    own = torch.tensor([order.index(outcome)], dtype=torch.int64)
    from sirtaki.common.ops import Max
    from sirtaki.torch.collectives import allreduce

    return order[int(allreduce(own, op=Max, name="auto.outcome"))]
