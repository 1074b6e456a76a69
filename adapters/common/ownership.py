"""The division of tensors among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sirtaki.bindings.context import Context


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
