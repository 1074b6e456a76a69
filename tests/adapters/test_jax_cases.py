"""Every JAX body, on ranks as processes: a compiled program finds its context by the process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
from tiers import full_unless

for package in ("jax", "optax", "flax", "equinox"):
    pytest.importorskip(package)

from cases import JAX_MODULES, Case, cases_for  # noqa: E402  # they import jax

# The cases that behave differently with three ranks; all cases run with two.
THREE = ("random_programs", "functions_inside_functions", "loops", "rows_are_exchanged", "some_of_the_ranks")
THREE += ("one_device[sgd-split]", "results_of_any_structure[1]", "count_less[local_sgd]")
THREE += ("count_less[diloco]", "replicas[('local_sgd', 3, 'eager')]", "replicas[('diloco', 3, 'compiled')]")

# With two ranks, what compiles large programs is left to the full tier.
LARGE = (
    "jax_one_batch.as_on_one_device[adam",
    "jax_one_batch.as_on_one_device[clipped",
    "jax_one_batch.as_on_one_device[sgd-eager",
    "jax_one_batch.as_on_one_device[sgd-whole",
    "jax_one_batch.gradients_of_a_function",
    "jax_programs",
    "jax_sharding.state_is_divided",
    "jax_sharding.whole_states",
    "jax_training.as_one_process[adam]",
    "jax_training.as_one_process[clipped]",
    "jax_training.equinox",
    "jax_training.flax",
    "jax_training.several_passes",
    "jax_transforms.torch_and_jax",
)


@pytest.mark.parametrize(
    ("size", "case"),
    [
        pytest.param(
            size,
            case,
            id=f"{size}-{case.name}",
            marks=full_unless(size == 2 and not case.name.startswith(LARGE)),
        )
        for size in (2, 3)
        for case in cases_for(size, JAX_MODULES)
        if size == 2 or case.name.endswith(THREE)
    ],
)
def test_as_processes(size: int, case: Case, run_case: Callable[[int, str], None]) -> None:
    if "torch" in case.name and importlib.util.find_spec("torch") is None:
        pytest.skip("there is no torch here")
    run_case(size, case.name)
