"""JAX's programs in one world after another: one rank, two, one, three."""

from __future__ import annotations

import pytest
from elastic.changing import run

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

PROGRAMS = ("Jit", "Eager", "Gradients", "Refusals")


def test_one_rank_two_one_three() -> None:
    run("programs_jax", (*PROGRAMS, "LocalSteps"))


def test_steps_that_are_undone_do_not_count() -> None:
    run("programs_jax", ("CountedSteps",))


def test_what_is_divided_or_counted_by_ranks_follows_them() -> None:
    """Numbers of the world are no constants, and divided state has the bits of one process."""
    run("programs_jax", ("Constants", "LocalStepsInHalf", "Sharded", "ShardedEager"))


@pytest.mark.skipif(not hasattr(jax, "make_user_context"), reason="needs jax.make_user_context")
def test_rows_of_one_batch_count_by_the_ranks_of_their_world() -> None:
    """B has two of five rows on two ranks, which count for 4/5, and on three, which count for 6/5."""
    run("programs_jax", ("Rows", "RowsOverInitial"), ("AB", "B", "BCD"))


def test_ranks_that_go_on_keep_the_state_of_their_local_steps() -> None:
    run("programs_jax", ("LocalSteps",), ("AB", "ABC", "AB"))


def test_the_loss_of_rank_0() -> None:
    run("programs_jax", PROGRAMS, ("ABC", "BC", "CD"))
    run("programs_jax", ("Constants",), ("ABC", "BC", "CD"))


def test_a_failed_exchange_leaves_the_commit_intact() -> None:
    run("programs_jax", ("FailedExchange",), ("AB",))


def test_the_slices_of_a_lost_rank_are_on_another() -> None:
    run("programs_jax", ("Sharded", "ShardedEager"), ("ABC", "BC", "CD"))


def test_slices_of_all_ranks_may_leave_as_agreed() -> None:
    run("programs_jax", ("ShardedAgreed",), ("ABC", "C", "CD"))


def test_a_rank_that_has_not_completed_a_commit_has_its_slices_of_it() -> None:
    run("programs_jax", ("ShardedUnfinished",), ("ABC", "AB", "ACB"))


def test_the_job_ends_with_what_was_lost_if_the_copies_are_lost_too() -> None:
    run("programs_jax", ("ShardedLost",), ("ABCD", "AD"))
