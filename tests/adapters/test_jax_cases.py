"""Every JAX body, on ranks as processes: a compiled program finds its context by the process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

for package in ("jax", "optax"):
    pytest.importorskip(package)

from cases import JAX_MODULES, Case, cases_for  # noqa: E402  # they import jax

# The cases that behave differently with three ranks; all cases run with two.
THREE = ("random_programs", "functions_inside_functions", "loops", "rows_are_exchanged", "some_of_the_ranks")
THREE += ("one_device[sgd-split]", "results_of_any_structure[1]", "count_less[local_sgd]")
THREE += ("count_less[diloco]", "replicas[('local_sgd', 3, 'eager')]", "replicas[('diloco', 3, 'compiled')]")


@pytest.mark.parametrize(
    ("size", "case"),
    [
        pytest.param(size, case, id=f"{size}-{case.name}")
        for size in (2, 3)
        for case in cases_for(size, JAX_MODULES)
        if size == 2 or case.name.endswith(THREE)
    ],
)
def test_as_processes(size: int, case: Case, run_case: Callable[[int, str], None]) -> None:
    if "torch" in case.name and importlib.util.find_spec("torch") is None:
        pytest.skip("there is no torch here")
    run_case(size, case.name)
