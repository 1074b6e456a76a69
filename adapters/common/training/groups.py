"""Gradients that complete together, by the argument `groups`, and the division of tensors among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from sirtaki.bindings.context import Context

T = TypeVar("T")
Groups = int | Sequence[Sequence[Any]] | None


class GroupRules(NamedTuple):
    """The properties of groups that differ between adapters.

    Attributes:
        member: the word for a member, for messages.
        expected: the end of the message about a negative number, with its punctuation.
        is_group: returns whether an object is a group of members.
        known: the `id()` of all that may be members; None: anything.
    """

    member: str
    expected: str
    is_group: Callable[[Any], bool] = lambda group: isinstance(group, list | tuple)
    known: frozenset[int] | None = None


def check_groups(groups: Groups, rules: GroupRules) -> None:
    """Raises ValueError unless `groups` is a number of groups, or disjoint groups of known members."""
    if groups is None:
        return
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups is {groups}{rules.expected}")
        return
    member, seen = rules.member, set[int]()
    for index, group in enumerate(groups):
        if not rules.is_group(group):
            raise ValueError(f"groups has to be a number, or a list of lists of {member}s")
        numbers = [id(item) for item in group]
        if len(seen.union(numbers)) < len(seen) + len(numbers):
            raise ValueError(f"a {member} of group {index} is in groups twice; it may be in one only")
        if rules.known is not None and not rules.known.issuperset(numbers):
            raise ValueError(f"a {member} of group {index} is not one of the optimizer's")
        seen.update(numbers)


def partitioned(items: Sequence[T], groups: Groups, member_of: Callable[[T], Any]) -> list[list[T]]:
    """Divides items into parts that complete together.

    Args:
        items: in an order that is the same on all ranks.
        groups: a number of parts of similar length, or groups of members: items in none are parts by
            themselves. None or 0: one part.
        member_of: returns the member that an item stands for.
    """
    if groups is None or groups == 0:
        return [list(items)] if items else []
    if isinstance(groups, int):
        count = min(groups, len(items))
        ends = [len(items) * number // count for number in range(count + 1)] if count else []
        return [list(items[start:end]) for start, end in pairwise(ends)]
    group_of = {id(member): number for number, group in enumerate(groups) for member in group}
    parts: dict[Any, list[T]] = {}
    for index, item in enumerate(items):
        parts.setdefault(group_of.get(id(member_of(item)), ("alone", index)), []).append(item)
    return list(parts.values())


# ---- The division of tensors among ranks ---------------------------------------------------------------


class Place(NamedTuple):
    """A rank's position among the ranks that divide the parameters, and their number."""

    position: int
    ranks: int


def place_in(context: Context) -> Place:
    """Returns this rank's place in a world; that of a single rank as long as the ranks do not exist."""
    return Place(0, 1) if context.is_provisional else Place(context.rank, context.size)


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Returns the owner of each tensor, from 0 to `ranks` - 1, so that all own about as many bytes.

    The largest tensor comes first, and each goes to the owner with the fewest bytes. Ranks that pass the
    same sizes, in bytes, get the same owners.
    """
    owners, loads = [0] * len(sizes), [0] * ranks
    for place in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners
