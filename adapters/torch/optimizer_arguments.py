"""Checks of the arguments of `DistributedOptimizer` that belong to no technique alone."""

from __future__ import annotations

from sirtaki.common.ops import Adasum
from sirtaki.common.process_sets import ProcessSet, global_process_set


def check_follows_changes(op: int, process_set: ProcessSet) -> None:
    """Raises ValueError for an optimizer that could not continue when the ranks of an elastic job change."""
    if op == Adasum:
        raise ValueError(
            "op=Adasum is not available in an elastic job: the ranks exchange after they have changed their "
            "parameters, so a lost rank would leave no common state; use op=Average"
        )
    if process_set is not global_process_set:
        raise ValueError(
            "in an elastic job all ranks have to train one model, because a rank that joins gets the state "
            "of another: leave out process_set"
        )


def check_techniques(**are_used: bool) -> None:
    """Raises ValueError for two options of which each decides itself whose gradients a step has."""
    used = [name for name, is_used in are_used.items() if is_used]
    if len(used) > 1:
        raise ValueError(f"{used[0]} and {used[1]} cannot be combined: give the optimizer one of them")


def check_passes(passes: int) -> None:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step is {passes}, but a step needs one pass at least")
