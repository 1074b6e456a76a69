"""The rule by which the cases of `tests/cases` are spread over further worlds in the full tier."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from cases import MODULES, Case, cases_for
from tiers import in_worlds, turn_of, with_kinds

FIRST, ALONE, FURTHER = [(2, "shm")], (1, "shm"), [(4, "shm"), (3, "shm"), (2, "socket")]
WORLDS = [ALONE, *FURTHER, *FIRST]


def tier_of(parameter: Any) -> str:
    return ", ".join(mark.name for mark in parameter.marks)


def some_cases(count: int, least: int) -> list[Case]:
    return [Case(f"module.body[{place}]", lambda: None, least, place) for place in range(count)]


@pytest.mark.parametrize("modules", [MODULES, *((module,) for module in MODULES)], ids=len)
def test_each_case_runs_in_the_first_worlds_and_in_one_other_of_the_full_tier(
    modules: tuple[str, ...],
) -> None:
    tiers = defaultdict(Counter)
    for parameter in in_worlds(WORLDS, FIRST, modules):
        size, kind, case = parameter.values
        tiers[case.name][tier_of(parameter)] += 1
        assert ((size, kind) in FIRST) == (tier_of(parameter) == "")
    for case in cases_for(4, modules):
        possible = sum(case.least <= size for size, _ in FURTHER)
        others = {"exhaustive": possible - 1} if possible > 1 else {}
        first = {"": 1} if case.least <= 2 else {}
        assert tiers.pop(case.name) == {**first, "full": 1 + (case.least == 1), **others}
    assert not tiers


def test_cases_of_a_module_take_the_worlds_in_turn() -> None:
    turns = [turn_of(case, FURTHER) for case in some_cases(6, least=1)]
    assert set(turns[:3]) == set(FURTHER)
    assert turns[3:] == turns[:3]


def test_no_case_is_in_a_world_that_is_too_small_for_it() -> None:
    assert {turn_of(case, FURTHER) for case in some_cases(4, least=3)} == {(4, "shm"), (3, "shm")}
    assert {turn_of(case, FURTHER) for case in some_cases(4, least=5)} == {None}


def test_the_turn_of_a_case_does_not_depend_on_the_process() -> None:
    """Each process of xdist has to collect the same tests."""
    assert turn_of(Case("joining.body", lambda: None), FURTHER) == (4, "shm")


def test_each_world_runs_cases_of_each_module_that_has_enough_of_them() -> None:
    in_full = [one for one in in_worlds(WORLDS, FIRST) if tier_of(one) == "full"]
    met = {(*one.values[:2], one.values[2].module) for one in in_full}
    counts = Counter((case.module, case.least) for case in cases_for(4))
    for (module, least), count in counts.items():
        for world in FURTHER:
            assert count < len(FURTHER) or least > world[0] or (*world, module) in met
    per_world = Counter(one.values[:2] for one in in_full)
    assert set(per_world) == {ALONE, *FURTHER}


def test_the_place_of_a_case_counts_those_before_it_that_need_as_many_ranks() -> None:
    for module in MODULES:
        places = defaultdict(list)
        for case in cases_for(1000, (module,)):
            places[case.least].append(case.place)
        assert all(found == list(range(len(found))) for found in places.values())


def test_tests_that_share_worlds_divide_the_parameters() -> None:
    parameters = in_worlds(WORLDS, FIRST)
    parts = with_kinds(parameters, "shm"), with_kinds(parameters, "socket")
    assert all(parts)
    assert sorted(one.id for part in parts for one in part) == sorted(one.id for one in parameters)
