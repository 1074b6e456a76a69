"""The arbiter's judgement of workers that end by themselves, with an exit code."""

from __future__ import annotations

import pytest
from elastic.arbiter_job import Job, finish, opened

from sirtaki.bindings.bootstrap.elastic.messages import Over
from sirtaki.runner.elastic.arbiter.model import EXIT, Close, Finish, Send


def test_an_early_exit_ends_the_job_if_others_wait() -> None:
    job = Job(start=2, slots=2)
    assert job.sees_exit(0) == []  # and nothing replaces it
    orders = job.enlists_new(1)
    assert finish(orders).code == 1
    assert "has ended before it called" in finish(orders).text


def test_a_program_without_a_training_function_ends_well() -> None:
    job = Job(start=2, slots=2)
    assert job.sees_exit(0) == []
    assert job.sees_exit(1) == [Finish(0, "")]


def test_an_exit_with_an_error_ends_the_job() -> None:
    job = Job(start=2, slots=2).trains()
    assert finish(job.sees_exit(1, 7)) == Finish(7, "rank 1 failed with exit code 7", 1)


@pytest.mark.parametrize("code", [1, 7])
def test_an_exit_with_an_error_is_a_loss_if_the_user_says_so(code: int) -> None:
    job = Job(start=2, slots=2, survive=EXIT).trains()
    over = Over(1, f"rank 1 was lost (failed with exit code {code})")
    assert job.sees_exit(1, code) == [Send(0, over), Close()]


def test_a_rank_that_ends_inside_the_training_function_fails_the_job_whatever_its_exit_code() -> None:
    job = Job(start=3, slots=3).trains()
    text = "rank 1 ended with exit code 0, but its training function has not returned"
    assert finish(job.sees_exit(1, 0)) == Finish(1, text, 1)


def test_a_rank_that_ends_inside_the_training_function_is_a_loss_if_the_user_says_so() -> None:
    job = Job(start=2, slots=2, survive=EXIT).trains()
    text = "rank 1 was lost (ended with exit code 0, but its training function has not returned)"
    assert job.sees_exit(1, 0) == [Send(0, Over(1, text)), Close()]
    assert opened(job.leaves(0, "lost", 4)).members == (0,)
