"""Averages of gradients in jobs whose ranks change: over the live ranks, or over those of the start."""

from __future__ import annotations

import importlib.util

import pytest
from elastic.running import QUICK, run_job
from tiers import exhaustive_unless

ALONE = ("--min-np", "1", "--blacklist-cooldown-range", "60", "60")
FRAMEWORKS = ("torch", "jax", "tensorflow", "tensorflow-function", "keras")
LIVE = {"2": [1.5], "1": [1.0]}  # gradients are 1 and 2
INITIAL = {"2": [1.5], "1": [0.5]}
# Elastic trainings of each framework average over the live ranks, too.
SECOND_TIER = {
    *(("torch", "live"), ("torch", "initial"), ("jax", "initial"), ("tensorflow-function", "initial")),
    *(("jax", "live"), ("tensorflow", "live"), ("keras", "initial")),
}


def environment(framework: str) -> dict[str, str]:
    if importlib.util.find_spec(framework.partition("-")[0]) is None:
        pytest.skip(f"there is no {framework} here")
    return {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("framework", "over", "expected"),
    [
        pytest.param(framework, over, expected, marks=exhaustive_unless((framework, over) in SECOND_TIER))
        for framework in FRAMEWORKS
        for over, expected in (("live", LIVE), ("initial", INITIAL))
    ],
)
def test_a_step_after_a_loss(framework: str, over: str, expected: dict[str, list[float]]) -> None:
    variables = environment(framework)
    job = run_job(("-np", "2", *ALONE), "averages.py", framework, 8, "1:4", over, **variables)
    assert job.code == 0, job.text
    assert [result["changes"] for result in job.results] == [expected]


def test_a_rank_that_joins_knows_the_size_at_the_start() -> None:
    """Workers 0 and 2 have gradients 1 and 3."""
    variables = environment("torch")
    job = run_job(
        ("-np", "2", "--min-np", "1", *QUICK),
        "averages.py",
        "torch",
        8,
        "1:4",
        "initial",
        HOLD="6:2",
        **variables,
    )
    assert job.code == 0, job.text
    found = {result["worker"]: result["changes"] for result in job.results}
    assert found == {0: {"2": [1.5, 2.0], "1": [0.5]}, 2: {"2": [2.0]}}


def test_ranks_that_average_differently_end_the_job() -> None:
    variables = environment("torch")
    job = run_job(("-np", "3", *ALONE), "averages.py", "torch", 4, "0:9", "mixed", **variables)
    assert job.code == 1
    assert "rank 1 averages gradients over the initial ranks, and rank 0 over the live ones" in job.text
