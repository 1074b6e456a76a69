"""Keras' objects in one world after another, on each backend: one rank, two, one, three."""

from __future__ import annotations

import importlib.util

import pytest
from elastic.changing import run
from tiers import exhaustive_unless

if importlib.util.find_spec("keras") is None:  # not imported here: that would fix its backend
    pytest.skip("there is no keras here", allow_module_level=True)

# In one process each: it is the import of the backend that takes the time.
PROGRAMS = ("Fit", "EagerFit", "GroupedFit", "LocalSteps", "LocalLayer", "SeveralOptimizers", "WarmUp")
PROGRAMS += ("ConvertedBatches", "Interrupted", "OrderOfBatches", "SkippedBatches", "Refusals")
BACKENDS = [
    "tensorflow",
    *(pytest.param(one, marks=exhaustive_unless(one == "jax")) for one in ("jax", "torch")),
]
DIVIDED = ("Sharded", "ShardedEager")
ON_JAX = ("Fit", "LocalSteps", "Sharded")  # what compiled steps without state do differently


@pytest.mark.parametrize(
    ("backend", "programs"),
    [
        pytest.param("tensorflow", (*PROGRAMS, *DIVIDED, "ShardedFunction"), id="tensorflow"),
        pytest.param("jax", ON_JAX, id="jax"),
        *(
            pytest.param(one, (*PROGRAMS, *DIVIDED), id=f"{one}-all", marks=pytest.mark.exhaustive)
            for one in ("jax", "torch")
        ),
    ],
)
def test_one_rank_two_one_three(backend: str, programs: tuple[str, ...]) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"there is no {backend} here")
    run("programs_keras", programs, KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_is_lost_in_fit(backend: str) -> None:
    """On JAX the arrays of the failed step have been donated, so they are gone."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"there is no {backend} here")
    run("programs_keras", ("LostRank",), ("ABC", "BC"), KERAS_BACKEND=backend)


def test_ranks_that_go_on_keep_the_state_of_their_local_steps() -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("there is no jax here")
    run("programs_keras", ("LocalSteps",), ("AB", "ABC", "AB"), KERAS_BACKEND="jax")


@pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=exhaustive_unless(name == "jax")) for name in ("tensorflow", "jax", "torch")],
)
def test_the_divided_state_of_a_lost_rank_is_on_another(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"there is no {backend} here")
    run("programs_keras", ("Sharded",), ("ABC", "BC", "CD"), KERAS_BACKEND=backend)


def test_ranks_with_divided_state_may_leave_as_agreed() -> None:
    run("programs_keras", ("ShardedAgreed",), ("ABC", "C", "CD"), KERAS_BACKEND="tensorflow")


def test_the_job_ends_with_what_was_lost_if_the_copies_are_lost_too() -> None:
    run("programs_keras", ("ShardedLost",), ("ABCD", "AD"), KERAS_BACKEND="tensorflow")
