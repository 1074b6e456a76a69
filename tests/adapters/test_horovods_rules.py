"""Horovod's rules, which a variable selects, for calls that mean something else in Horovod."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("tensorflow")

from cases import HOROVODS_RULES_MODULES, cases_for

RunCase = Callable[[int, str], None]


@pytest.mark.parametrize("name", [case.name for case in cases_for(2, HOROVODS_RULES_MODULES)])
def test_two_ranks(name: str, run_case_with_horovods_rules: RunCase) -> None:
    run_case_with_horovods_rules(2, name)


@pytest.mark.parametrize("name", [case.name for case in cases_for(3, HOROVODS_RULES_MODULES)])
def test_three_ranks(name: str, run_case_with_horovods_rules: RunCase) -> None:
    run_case_with_horovods_rules(3, name)
