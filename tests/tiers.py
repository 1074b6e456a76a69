"""The tiers: `make test` runs the first, `make test-full` the second, `make test-exhaustive` the third.

The first tier is the table `first_tier.yaml`: for each row of README's tables, the tests that show it. It
takes minutes, so a test belongs there if no other test of the table shows the same. The third has the tests
of the table `third_tier.yaml`, by what the earlier tiers run in their place, and tests with the marker
`exhaustive`. Every other test is in the second.

A case of `tests/cases` runs in each of a test's main worlds before the third tier. Of the further worlds of
a test in which it is meaningful (other sizes, transports, backends), the second tier takes one: the cases of
a module that need the same number of ranks take these worlds in turn. So the variants of a body run in
different worlds, and each world runs cases of each module. Where worlds are slow (several hosts, a second
number of ranks or backend of a framework), the second tier runs a sample of the cases. Worlds of one rank,
where many cases assert something else, run all cases in the second tier. The other pairs of a case and a
world are in the third tier. So are further seeds of random tests, and trainings on further numbers of ranks,
backends and launchers, of which the second tier has one.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import MODULES, Case, cases_for

TIERS = ("first", "second", "third")
TABLE = Path(__file__).with_name("first_tier.yaml")
THIRD_TABLE = TABLE.with_name("third_tier.yaml")
World = tuple[int, str]  # its size, and how it is connected, or what else distinguishes it
Marks = Collection[pytest.MarkDecorator]


@dataclass(frozen=True)
class Table:
    """Tests by the reason for which they are in a tier: how their ids start, after `tests/`."""

    reasons: dict[str, tuple[str, ...]]

    @classmethod
    def load(cls, path: Path) -> Table:
        table = yaml.safe_load(path.read_text())
        return cls({reason: tuple(starts) for reason, starts in table.items()})

    @cached_property
    def starts(self) -> tuple[str, ...]:
        return tuple(start for starts in self.reasons.values() for start in starts)

    @cached_property
    def _files(self) -> set[str]:
        return {start.partition("::")[0] for start in self.starts}

    def has_tests_in(self, path: Path) -> bool:
        """Returns whether the table has tests of this file, or in this folder."""
        name = path.relative_to(TABLE.parent).as_posix()
        return path == TABLE.parent or any(
            file == name or file.startswith(f"{name}/") for file in self._files
        )

    def unmatched(self, ids: Collection[str]) -> list[str]:
        """Returns the entries about the files of these tests that match none of the tests."""
        files = {name.partition("::")[0] for name in ids}
        return [
            start
            for start in self.starts
            if start.partition("::")[0] in files and not any(name.startswith(start) for name in ids)
        ]

    def fulfilled(self, ids: Iterable[str]) -> list[str]:
        """Returns the reasons, here promises of README, of which these tests show each entry."""
        ids = list(ids)
        return [
            reason
            for reason, starts in self.reasons.items()
            if all(any(name.startswith(start) for name in ids) for start in starts)
        ]


def name_of(nodeid: str) -> str:
    """Returns a test's id after `tests/`, wherever pytest was started."""
    return nodeid.partition("tests/")[2] or nodeid


def tier_of(item: pytest.Item, first: Table, third: Table) -> str:
    name = name_of(item.nodeid)
    if item.get_closest_marker("exhaustive"):
        return "third"
    if name.startswith(first.starts):
        return "first"
    return "third" if name.startswith(third.starts) else "second"


def exhaustive_unless(is_second: bool) -> Marks:
    """Returns the marks of a parameter set, which belongs to the second tier or to the third."""
    return () if is_second else (pytest.mark.exhaustive,)


def turn_of(case: Case, further: Sequence[World]) -> World | None:
    """Returns the world of several ranks where the second tier runs the case; None if all are too small."""
    possible = [world for world in further if max(case.least, 2) <= world[0]]
    # Modules start at different worlds: those with few cases would all leave out the last ones.
    return possible[(zlib.crc32(case.module.encode()) + case.place) % len(possible)] if possible else None


def in_worlds(
    worlds: Iterable[World],
    main: Collection[World],
    modules: tuple[str, ...] = MODULES,
    every: int = 1,
) -> list[Any]:
    """Returns each world with each case, marked with its tier; the worlds `main` run all cases.

    Of the cases that need several ranks, the further worlds run one of `every` so many in the second tier.
    """
    worlds = list(worlds)
    further = [world for world in worlds if world not in main]
    return [
        pytest.param(*world, case, id=f"{world[0]}-{world[1]}-{case.name}", marks=exhaustive_unless(runs))
        for world in worlds
        for case in cases_for(world[0], modules)
        for runs in [
            world in main or world[0] == 1 or (is_sampled(case, every) and world == turn_of(case, further))
        ]
    ]


def is_sampled(case: Case, every: int) -> bool:
    """Returns whether the second tier runs a case where it runs one of `every` so many."""
    return (zlib.crc32(case.module.encode()) + case.place) % every == 0


def with_kinds(parameters: Iterable[Any], *kinds: str) -> list[Any]:
    """Returns the parameters of `in_worlds` with worlds of these kinds, for a test that runs only those."""
    return [parameter for parameter in parameters if parameter.values[1] in kinds]
