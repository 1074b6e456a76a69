"""The rules for objects that are used in several worlds of an elastic job, for every library of arrays."""

from __future__ import annotations

from sirtaki.bindings.context import Context, find
from sirtaki.bindings.survivors import Survivor
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.training.combinations import refuse_combinations


def is_elastic() -> bool:
    """Returns whether the ranks of this job may change. Worlds of a single rank then communicate, too."""
    context = find()
    return context is not None and context.survivors is not None


def add_survivor(survivor: Survivor) -> None:
    """Registers an object that has to act when the ranks change; does nothing in other jobs."""
    context = find()
    if context is not None and context.survivors is not None:
        context.survivors.add(survivor)


def require_all_ranks(process_set: ProcessSet) -> None:
    """Raises ValueError if an object of an elastic job is to work on some of the ranks only."""
    has_set = process_set is not global_process_set
    refuse_combinations({"elastic": is_elastic(), "process_set": has_set})


def reserve_number(context: Context, kind: str, number: int) -> None:
    """Makes objects of a kind that a world creates later get higher numbers than this number.

    An object keeps its number, and so its names, from world to world: compiled programs contain them.
    """
    while context.count_of(kind) <= number:
        context.next_number(kind)
