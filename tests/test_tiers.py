"""The tiers: the table of the first, and the rule by which cases of `tests/cases` are spread over worlds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from cases import MODULES, Case, cases_for
from tiers import TABLE, THIRD_TABLE, Table, in_worlds, turn_of, with_kinds

README = Path(__file__).parents[1] / "README.md"

MAIN, ALONE, FURTHER = [(2, "shm")], (1, "shm"), [(4, "shm"), (3, "shm"), (2, "socket")]
WORLDS = [ALONE, *FURTHER, *MAIN]


def rows_of_readme() -> list[str]:
    """Returns the first cells of README's tables, without marks."""
    cells = re.findall(r"^\| ([^|]+) \|", README.read_text(), re.MULTILINE)
    return [re.sub(r"`|\[|\]\([^)]*\)", "", cell) for cell in cells if cell != "you have"]


def test_each_row_of_readme_has_tests_in_the_first_tier() -> None:
    promises = Table.load(TABLE).reasons
    rows = rows_of_readme()
    assert len(rows) > 15
    assert [row for row in rows if not row.startswith(tuple(promises))] == []
    assert [promise for promise in promises if not any(row.startswith(promise) for row in rows)] == []


@pytest.mark.parametrize("table", [TABLE, THIRD_TABLE])
def test_the_files_of_a_table_exist(table: Path) -> None:
    for start in Table.load(table).starts:
        assert (TABLE.parent / start.partition("::")[0]).exists(), start


def test_each_entry_of_the_first_tier_matches_a_test() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "--tier", "first", "--collect-only", "--quiet", TABLE.parent]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_an_entry_that_matches_no_test_of_its_file_is_found() -> None:
    table = Table({"a": ("x.py::test_a", "x.py::test_b", "y.py::test_c")})
    assert table.unmatched(["x.py::test_a[1]", "x.py::test_d"]) == ["x.py::test_b"]


def test_a_promise_is_fulfilled_by_tests_of_all_its_entries() -> None:
    table = Table({"a": ("x.py::test_a", "x.py::test_b"), "b": ("y.py",)})
    assert table.fulfilled(["x.py::test_a[1]", "y.py::test_c"]) == ["b"]
    assert table.fulfilled(["x.py::test_a[1]", "x.py::test_b"]) == ["a"]


def test_files_and_folders_with_tests_of_the_first_tier_are_collected() -> None:
    tests = TABLE.parent
    table = Table({"a": ("adapters/test_torch_cases.py::test_as_threads",), "b": ("core/test_core.py",)})
    for name in ("adapters", "adapters/test_torch_cases.py", "core", "core/test_core.py"):
        assert table.has_tests_in(tests / name), name
    for name in ("adapters/test_torch_calls.py", "runner", "cases"):
        assert not table.has_tests_in(tests / name), name


def is_in_third_tier(parameter: Any) -> bool:
    return pytest.mark.exhaustive in parameter.marks


def some_cases(count: int, least: int) -> list[Case]:
    return [Case(f"module.body[{place}]", lambda: None, least, place) for place in range(count)]


@pytest.mark.parametrize("modules", [MODULES, *((module,) for module in MODULES)], ids=len)
def test_each_case_runs_in_the_main_worlds_and_in_one_further_world_before_the_third_tier(
    modules: tuple[str, ...],
) -> None:
    worlds: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for parameter in in_worlds(WORLDS, MAIN, modules):
        if not is_in_third_tier(parameter):
            worlds[parameter.values[2].name].append(parameter.values[:2])
    for case in cases_for(4, modules):
        found = worlds.pop(case.name)
        expected = [world for world in (*MAIN, ALONE) if case.least <= world[0]]
        assert set(expected) <= set(found)
        assert len(found) == len(expected) + 1
    assert not worlds


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
    second = [parameter for parameter in in_worlds(WORLDS, MAIN) if not is_in_third_tier(parameter)]
    met = {(*parameter.values[:2], parameter.values[2].module) for parameter in second}
    counts = Counter((case.module, case.least) for case in cases_for(4))
    for (module, least), count in counts.items():
        for world in FURTHER:
            assert count < len(FURTHER) or least > world[0] or (*world, module) in met
    assert {parameter.values[:2] for parameter in second} == set(WORLDS)


def test_the_place_of_a_case_counts_those_before_it_that_need_as_many_ranks() -> None:
    for module in MODULES:
        places = defaultdict(list)
        for case in cases_for(1000, (module,)):
            places[case.least].append(case.place)
        assert all(found == list(range(len(found))) for found in places.values())


def test_tests_that_share_worlds_divide_the_parameters() -> None:
    parameters = in_worlds(WORLDS, MAIN)
    parts = with_kinds(parameters, "shm"), with_kinds(parameters, "socket")
    assert all(parts)
    assert sorted(one.id for part in parts for one in part) == sorted(one.id for one in parameters)
