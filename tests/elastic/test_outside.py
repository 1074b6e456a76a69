"""Exchanges of compiled programs where the ranks of an elastic job do not exist, and jobs that are none."""

from __future__ import annotations

import importlib.util

import pytest
from elastic.running import run_job


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_a_compiled_exchange_before_the_training_is_refused(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"there is no {framework} here")
    job = run_job(("-np", "2", "--min-np", "1"), "outside.py", framework)
    assert job.code == 1
    assert "this rank exchanges data outside of hvd.elastic.run" in job.text


def test_a_job_that_is_not_elastic_imports_nothing_of_it() -> None:
    job = run_job(("-np", "2"), "elastic_modules.py")
    assert job.code == 0, job.text
    assert job.text.count("MODULES []") == 2, job.text
