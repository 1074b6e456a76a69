"""Lost ranks in trainings with divided state, with JAX and Keras: the result is that of one process."""

from __future__ import annotations

import importlib.util

import pytest
from elastic.running import QUICK, check_replayed, run_job

THREE = ("-np", "3", "--min-np", "1", *QUICK)
SAMPLES, EPOCHS = 40, 2


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("program", "backend", "tolerance"),
    [("jax_training.py", "jax", 1e-12), ("keras_training.py", "tensorflow", 1e-12)],
)
def test_a_rank_with_slices_of_the_state_is_lost_and_another_joins(
    program: str, backend: str, tolerance: float, victim: int
) -> None:
    for module in (backend, program.partition("_")[0]):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"there is no {module} here")
    options = {"SHARD": "state", "HOLD": "8:3", "FAULT": f"{victim}:5", "KERAS_BACKEND": backend}
    job = run_job(THREE, program, SAMPLES, EPOCHS, **options)
    check_replayed(job, SAMPLES, EPOCHS, {0, 1, 2} - {victim}, tolerance)
    assert f"rank {victim} was lost" in job.text
    assert all(result["size"] == 3 for result in job.results)
