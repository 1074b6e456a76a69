"""The tiers: `make test` runs the tests without a marker, `make test-full` those with the marker `full`.

A test gets the marker `full` if it shows at a high cost what the first tier shows elsewhere: in another
world, on another backend, in a whole training, with random faults. The first tier tests each behaviour.

A case of `tests/cases` runs in up to three worlds of the first tier; one that needs more ranks than these
have runs in the full tier only. Of the further worlds of a test in which it is meaningful (other sizes,
transports, backends), the full tier takes one: the cases of a module that need the same number of ranks
take these worlds in turn. So the variants of a body run in different worlds, and each world runs cases of
each module. Worlds of one rank, where many cases assert something else, run all cases in the full tier.
The other pairs of a case and a world have the marker `exhaustive`, and run with `make test-exhaustive`. So
do further seeds of random tests, and trainings on further numbers of ranks, backends and launchers, of
which the full tier has one.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest
from cases import MODULES, Case, cases_for

World = tuple[int, str]  # its size, and how it is connected, or what else distinguishes it
Marks = Collection[pytest.MarkDecorator]


def full_unless(is_first: bool) -> Marks:
    """Returns the marks of a parameter set, which belongs to the first tier or to the full one."""
    return () if is_first else (pytest.mark.full,)


def exhaustive_unless(is_full: bool) -> Marks:
    """Returns the marks of a parameter set, which belongs to the full tier or to the exhaustive one."""
    return (pytest.mark.full,) if is_full else (pytest.mark.exhaustive,)


def turn_of(case: Case, further: Sequence[World]) -> World | None:
    """Returns the one of these worlds of several ranks in which the full tier runs the case; None if all are
    too small.
    """
    possible = [world for world in further if max(case.least, 2) <= world[0]]
    # Modules start at different worlds: those with few cases would all leave out the last ones.
    return possible[(zlib.crc32(case.module.encode()) + case.place) % len(possible)] if possible else None


def in_worlds(
    worlds: Iterable[World],
    first: Collection[World],
    modules: tuple[str, ...] = MODULES,
) -> list[Any]:
    """Returns each world with each case, marked with its tier; the worlds `first` are of the first tier."""
    worlds = list(worlds)
    further = [world for world in worlds if world not in first]
    return [
        pytest.param(*world, case, id=f"{world[0]}-{world[1]}-{case.name}", marks=marks)
        for world in worlds
        for case in cases_for(world[0], modules)
        for marks in [_marks(world, first, turn_of(case, further))]
    ]


def _marks(world: World, first: Collection[World], turn: World | None) -> Marks:
    return () if world in first else exhaustive_unless(world == turn or world[0] == 1)


def with_kinds(parameters: Iterable[Any], *kinds: str) -> list[Any]:
    """Returns the parameters of `in_worlds` with worlds of these kinds, for a test that runs only those."""
    return [one for one in parameters if one.values[1] in kinds]
