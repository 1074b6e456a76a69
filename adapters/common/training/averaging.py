"""The divisor of averaged gradients: the number of live ranks, or of ranks at the start."""

from __future__ import annotations

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.common.ops.reduction import Reduction


def fixed_divisor(context: Context) -> int | None:
    """Returns the number by which averages of gradients are divided in each generation of the job.

    None: by the number of live ranks, as in other jobs. A program that is being traced may keep the result.
    """
    survivors = context.survivors
    if survivors is None:
        return None
    if context.is_provisional:
        survivors.has_averaged_early = True
        return None
    membership = survivors.membership
    return membership.initial if survivors.averages_over_initial and membership is not None else None


def gradient_sum(how: Reduction, divisor: int | None) -> Reduction:
    """Returns a reduction of gradients that divides an average by `divisor`, unless that is None."""
    if divisor is None or how.op != core.AVERAGE:
        return how
    return how._replace(op=core.SUM, prescale=how.prescale / divisor)
