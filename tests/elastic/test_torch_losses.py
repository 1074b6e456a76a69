"""Lost ranks in a training with torch: the result is that of one process with the same samples."""

from __future__ import annotations

import pytest
from elastic.running import QUICK, Ended, check_replayed, run_job

pytest.importorskip("torch")

SAMPLES = 90
THREE = ("-np", "3", "--min-np", "1", *QUICK)


def check(job: Ended, workers: set[int]) -> None:
    check_replayed(job, SAMPLES, 1, workers, 1e-9)


@pytest.mark.parametrize("place", ["step", "exchanged", "written"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_lost_in_a_training_with_torch(place: str, victim: int) -> None:
    job = run_job(THREE, "torch_training.py", SAMPLES, f"{victim}:{place}:9")
    check(job, {0, 1, 2} - {victim})
    assert f"rank {victim} was lost" in job.text


def test_two_ranks_are_lost_one_after_the_other_and_others_join() -> None:
    job = run_job(THREE, "torch_training.py", SAMPLES, "1:written:3", "0:step:6", HOLD="12:3")
    check(job, {2})
    assert all(result["size"] == 3 for result in job.results)


@pytest.mark.parametrize("place", ["step", "written"])
def test_a_rank_is_lost_while_the_updates_of_others_are_due(place: str) -> None:
    """The bits are those of the same job without overlap_forward: another rank joins at step 12 in both.

    Without the gradients of rank 1, the others leave their world with all updates due.
    """
    faults, options = (f"1:{place}:10",), {"EVERY": "3", "HOLD": "12:3"}
    job = run_job(THREE, "torch_training.py", SAMPLES, *faults, **options, OVERLAP="1")
    plain = run_job(THREE, "torch_training.py", SAMPLES, *faults, **options)
    for one in (job, plain):
        check(one, {0, 2})
        assert "2 ranks from commit 3 on: rank 1 was lost" in one.text
    assert job.results[0]["steps"] == plain.results[0]["steps"]
    assert job.results[0]["digest"] == plain.results[0]["digest"]


def test_nothing_is_lost_without_a_loss() -> None:
    job = run_job(THREE, "torch_training.py", SAMPLES)
    check(job, {0, 1, 2})
    assert sum(len(samples) for _, samples in job.results[0]["steps"]) == SAMPLES


@pytest.mark.parametrize(("shard", "victim"), [("state", 0), ("gradients", 1)])
def test_a_rank_with_slices_of_the_state_is_lost_and_another_joins(shard: str, victim: int) -> None:
    options = {"EVERY": "3", "HOLD": "12:3", "SHARD": shard}
    job = run_job(THREE, "torch_training.py", SAMPLES, f"{victim}:written:10", **options)
    check(job, {0, 1, 2} - {victim})
    assert f"rank {victim} was lost" in job.text
    assert all(result["size"] == 3 for result in job.results)
