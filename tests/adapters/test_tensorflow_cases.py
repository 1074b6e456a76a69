"""Every TensorFlow body on two ranks, and on three whose operations have one thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiers import exhaustive_unless, is_sampled

pytest.importorskip("tensorflow")

from cases import TENSORFLOW_MODULES, cases_for  # imports tensorflow


@pytest.mark.parametrize("name", [case.name for case in cases_for(2, TENSORFLOW_MODULES)])
def test_two_ranks(name: str, run_case: Callable[[int, str], None]) -> None:
    run_case(2, name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case.name, marks=exhaustive_unless(is_sampled(case, 3)))
        for case in cases_for(3, TENSORFLOW_MODULES)
    ],
)
def test_three_ranks_with_one_thread(name: str, run_case_in_one_thread: Callable[[int, str], None]) -> None:
    run_case_in_one_thread(3, name)
