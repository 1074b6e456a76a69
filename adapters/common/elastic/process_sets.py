"""Process sets that were added before `hvd.elastic.run`: they follow their members from world to world.

The members are those ranks of the first generation. A set is used with their ranks in the present world, in
ascending order. When one of them is lost, the set has ended for good. A rank that joins takes over what
rank 0 knows about each set; the core numbers the sets of a world in the order in which they were added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import MismatchError
from sirtaki.bindings.survivors import Membership, Survivors
from sirtaki.common.objects import gather_objects
from sirtaki.common.process_sets import ProcessSet, add_to_world, global_process_set

_NAME = "elastic.process_sets"  # a reserved name, which separates this exchange from the user's operations


class Members(NamedTuple):
    """The members of a set: their ranks in a generation, and the numbers of their processes."""

    generation: int
    ranks: list[int]
    workers: list[int]


class _Fate(NamedTuple):
    """The course of a set so far; `members` are those when it was last in use, None before that."""

    declared: list[int]
    members: Members | None
    why_unusable: str


class FollowingSets:
    """The process sets of one process that follow their members."""

    def __init__(self, survivors: Survivors) -> None:
        self._survivors = survivors
        self._sets: list[ProcessSet] = survivors.process_sets
        self._fates = [_Fate(list(one._ranks), None, "") for one in self._sets]

    def move_to(self, context: Context, *, is_new: bool, all_know: bool) -> None:
        """Makes the sets usable in another world. All of its ranks call it, before anything else.

        Args:
            context: the world. Its rank 0 is not new, unless all ranks are.
            is_new: whether this rank has not taken part in a whole generation.
            all_know: whether that is so on no rank, or this rank is the only one.

        Raises:
            MismatchError: ranks have added different sets before `hvd.elastic.run`, or chosen different
                averages of gradients.
            ValueError: a set has a rank that the first generation does not have.
            PeerLostError: a rank was lost.
        """
        membership = self._survivors.membership
        assert membership is not None
        mine = [_known(one, fate, is_new) for one, fate in zip(self._sets, self._fates, strict=True)]
        tables = [mine]
        if not all_know:
            choice = self._survivors.averages_over_initial
            gathered = gather_objects(context, (choice, mine), _NAME, global_process_set)
            _check_averages([choice for choice, _ in gathered])
            tables = [table for _, table in gathered]
        _check_equal(tables)
        fates = [_fate_in(membership, fate) for fate in tables[0]]
        for one, fate in zip(self._sets, fates, strict=True):
            if fate.members is None or fate.why_unusable:
                one._end(fate.why_unusable)
            else:
                one._ranks = sorted(fate.members.ranks)
                add_to_world(context, one)
        self._fates = fates


def _known(process_set: ProcessSet, fate: _Fate, is_new: bool) -> _Fate:
    """Returns what this rank knows about a set; before its first whole generation, only its ranks."""
    if is_new or fate.members is None:
        return _Fate(fate.declared, None, "")
    return fate._replace(why_unusable=process_set._why_unusable)


def _check_averages(choices: Sequence[bool]) -> None:
    """Raises MismatchError, on all ranks, if one of them divides averages of gradients unlike rank 0."""
    names = ["initial" if choice else "live" for choice in choices]
    for rank, name in enumerate(names):
        if name != names[0]:
            raise MismatchError(
                f"rank {rank} averages gradients over the {name} ranks, and rank 0 over the {names[0]} ones: "
                "all ranks have to call state.average_over() alike, before hvd.elastic.run"
            )


def _check_equal(tables: Sequence[Sequence[_Fate]]) -> None:
    """Raises MismatchError, on all ranks, if one of them has added other sets than rank 0."""
    added = [[fate.declared for fate in table] for table in tables]
    for rank, sets in enumerate(added):
        if sets != added[0]:
            raise MismatchError(
                f"rank {rank} has added process sets of the ranks {sets} before hvd.elastic.run, but rank 0 "
                f"{added[0]}: all ranks have to add the same sets in the same order"
            )


def _fate_in(membership: Membership, fate: _Fate) -> _Fate:
    """Returns the course of a set with a generation's members."""
    generation, workers = membership.generation, membership.workers
    if fate.why_unusable:
        return fate
    if fate.members is None:
        if fate.declared[-1] >= len(workers):
            raise ValueError(
                f"the process set of ranks {fate.declared} was added before hvd.elastic.run, but the ranks "
                f"are 0 to {len(workers) - 1}"
            )
        ranks = fate.declared
        return fate._replace(members=Members(generation, ranks, [workers[rank] for rank in ranks]))
    before = fate.members
    places = zip(before.ranks, before.workers, strict=True)
    if gone := [rank for rank, worker in places if worker not in workers]:
        return fate._replace(why_unusable=_loss(before.generation, gone))
    ranks = [workers.index(worker) for worker in before.workers]
    return fate._replace(members=Members(generation, ranks, before.workers))


def _loss(generation: int, ranks: Sequence[int]) -> str:
    """Returns the text about members that are gone."""
    if len(ranks) == 1:
        who = f"rank {ranks[0]} of generation {generation} was lost or has left"
    else:
        who = f"ranks {', '.join(map(str, ranks))} of generation {generation} were lost or have left"
    return f"{who}. Make a new set of ranks that live, inside the training function"
