"""Every body about Keras, on each backend, with ranks as processes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from unittest import mock

import pytest
from tiers import exhaustive_unless, is_sampled

pytest.importorskip("torch")
with mock.patch.dict(os.environ, KERAS_BACKEND="torch"):  # here the cases are only counted
    pytest.importorskip("keras")

    from cases import KERAS_MODULES, Case, cases_for

    CASES = cases_for(2, KERAS_MODULES)

# Code that is the same on every backend is tested on two of them. JAX compiles each eager operation.
ON_JAX = (
    "keras_callbacks.a_learning_rate",
    "keras_callbacks.the_same_start",
    "keras_callbacks.a_rank_that_stops_alone",
    "keras_callbacks.ranks_that_stop_together",
    "keras_callbacks.a_loss_that_is_no_number_on_one_rank",
    "keras_gradients.averaged",
    "keras_gradients.accumulated",
    "keras_gradients.what_nobody_has",
    "keras_loss_scale.an_overflow_of_a_gradient_that_stays_on_its_rank[by Keras]",
    "keras_loss_scale.an_overflow_on_one_rank[by Keras]",
    "keras_loss_scale.the_same_steps_are_skipped",
    "keras_periodic.",
    "keras_sharding.same_bits_in_compiled_steps",
    "keras_sharding.same_bits[momentum]",
    "keras_sharding.a_file_and_back",
    "keras_steps.",
    "keras_training.compiled_fit",
    "keras_training.losses_that_are_no_means_over_rows[sum]",
    "keras_training.losses_that_are_no_means_over_rows[mean by weights under a mask]",
    "keras_training.losses_that_are_no_means_over_rows[mean under a mask]",
)


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(
            backend,
            case,
            id=f"{backend}-{case.name}",
            marks=exhaustive_unless(backend == "torch" or is_sampled(case, 2)),
        )
        for backend in ("jax", "tensorflow", "torch")
        for case in CASES
        if backend != "jax" or case.name.startswith(ON_JAX)
    ],
)
def test_as_processes(backend: str, case: Case, run_case_in_keras: Callable[[str, int, str], None]) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"there is no {backend} here")
    run_case_in_keras(backend, 2, case.name)
