"""Lost ranks: the others go on in their processes, from the last commit, and no sample is lost."""

from __future__ import annotations

import pytest
from elastic.running import QUICK, check_exact, run_job

FOUR = ("-np", "4", "--min-np", "1", *QUICK)
PLACES = ("step", "exchanged", "written", "committed")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_lost_in_any_part_of_a_step(place: str, victim: int) -> None:
    job = run_job(FOUR, "numpy_training.py", 100, 0.01, f"{victim}:{place}:5")
    check_exact(job, 100, {0, 1, 2, 3} - {victim})
    assert f"rank {victim} was lost: killed by signal 9 (SIGKILL)" in job.text
    survivors = [result for result in job.results if result["worker"] < 4]
    assert all(result["changes"][1]["size"] == 3 for result in survivors)


def test_several_ranks_are_lost_at_once() -> None:
    faults = [f"{victim}:step:4" for victim in (0, 1, 3)]
    job = run_job(FOUR, "numpy_training.py", 60, 0.01, *faults)
    check_exact(job, 60, {2})


@pytest.mark.parametrize("place", ["link", "receive"])
@pytest.mark.parametrize("second", [0, 2])
def test_a_second_rank_is_lost_while_the_first_loss_is_healed(place: str, second: int) -> None:
    job = run_job(FOUR, "numpy_training.py", 80, 0.01, "1:exchanged:5", f"{second}:{place}:2")
    check_exact(job, 80, {0, 2, 3} - {second})


def test_a_replacement_that_is_lost_while_it_joins_is_replaced() -> None:
    faults = ("1:step:3", "4:receive:1", "5:link:1", "6:import:0")
    job = run_job(FOUR, "numpy_training.py", 100, 0.0, *faults, HOLD="10:4")
    check_exact(job, 100, {0, 2, 3, 7})
    assert all(result["size"] == 4 for result in job.results)


def test_a_rank_is_replaced_although_the_key_was_cleaned_away() -> None:
    job = run_job(FOUR, "numpy_training.py", 100, 0.0, "2:clean-step:2", "1:step:4", HOLD="10:4")
    check_exact(job, 100, {0, 2, 3, 4})


def test_ranks_keep_their_local_rank_and_the_oldest_is_rank_0() -> None:
    job = run_job(FOUR, "numpy_training.py", 100, 0.0, "0:step:3", HOLD="10:4")
    check_exact(job, 100, {1, 2, 3, 4})
    assert {result["worker"]: result["local_rank"] for result in job.results} == {1: 1, 2: 2, 3: 3, 4: 0}
    assert next(result["rank"] for result in job.results if result["worker"] == 1) == 0


def test_a_stopped_rank_is_given_up_when_its_deadline_has_passed() -> None:
    job = run_job(
        FOUR,
        "numpy_training.py",
        60,
        0.01,
        "2:stop-step:5",
        SIRTAKI_STALL_REPORT="1",
        SIRTAKI_STALL_DEADLINE="2",
    )
    check_exact(job, 60, {0, 1, 3})
    assert "rank 2 is given up and killed" in job.text


def test_a_rank_returns_to_its_commit_before_it_asks_for_a_place() -> None:
    """Returning may take longer than others wait for the links of a rank that has a place."""
    options = ("-np", "3", "--min-np", "2", *QUICK)
    job = run_job(options, "numpy_training.py", 60, 0.01, "1:step:5")
    check_exact(job, 60, {0, 2})
    survivors = [result for result in job.results if result["worker"] in (0, 2)]
    assert all(result["calls"][:3] == ["enlist", "restore", "enlist"] for result in survivors)


def test_the_loss_of_all_ranks_ends_the_job() -> None:
    job = run_job(FOUR, "numpy_training.py", 60, 0.01, *[f"{victim}:step:4" for victim in range(4)])
    assert job.code == 1
    assert "all ranks were lost" in job.text


def test_no_loss_costs_nothing_but_the_summary_is_silent() -> None:
    job = run_job(FOUR, "numpy_training.py", 40, 0.0)
    check_exact(job, 40, {0, 1, 2, 3})
    assert "of ranks, " not in job.text
    assert all(len(result["changes"]) == 1 for result in job.results)


def test_reset_callbacks_may_exchange_while_nobody_joins() -> None:
    options = ("-np", "3", "--min-np", "1", "--blacklist-cooldown-range", "60", "60")
    job = run_job(options, "numpy_training.py", 60, 0.0, "1:step:5", RESET="1")
    check_exact(job, 60, {0, 2})


def test_reset_callbacks_that_exchange_are_refused_when_a_rank_joins() -> None:
    job = run_job(FOUR, "numpy_training.py", 60, 0.0, "1:step:5", HOLD="8:4", RESET="1")
    assert job.code == 1
    assert "ranks that have just joined do not call reset callbacks" in job.text
    assert "in <lambda>() at numpy_training.py" in job.text
