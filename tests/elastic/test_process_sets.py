"""Process sets of jobs whose ranks change: one that is added before the training, and one in it."""

from __future__ import annotations

from typing import Any

import pytest
from elastic.running import QUICK, Ended, run_job

FOUR = ("-np", "4", "--min-np", "1", *QUICK)
ALONE = ("-np", "4", "--min-np", "1", "--blacklist-cooldown-range", "60", "60")
LOST = (
    "the process set of ranks [1, 2] cannot be used: rank 2 of generation 1 was lost or has left. Make a new "
    "set of ranks that live, inside the training function"
)


def check(job: Ended, workers: set[int], worlds: int, following: Any) -> None:
    """Checks what each of these workers has seen in so many worlds.

    `following` has, by world, the sum and number of the workers of the set that was added before: None for a
    set that cannot be used any more.
    """
    assert job.code == 0, job.text
    assert {result["worker"] for result in job.results} == workers, job.text
    for result in job.results:
        assert [text.partition(":")[0] for text in result["before"]] == [
            "the process set of ranks [1, 2] cannot be used"
        ] * 3
        seen = result["seen"]
        assert len(seen) <= worlds
        for world, expected in zip(seen, following[-len(seen) :], strict=True):
            members = world["workers"]
            assert members[world["rank"]] == result["worker"]
            evens = members[::2]
            is_even = result["worker"] in evens
            assert world["evens"] == ([sum(evens), len(evens)] if is_even else None)
            if expected is None:
                assert world["following"] == LOST
            else:
                assert world["following_ranks"] == sorted(members.index(one) for one in (1, 2))
                assert world["following"] == (expected if result["worker"] in (1, 2) else None)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_set_follows_its_members_when_another_rank_is_lost(victim: int) -> None:
    job = run_job(ALONE, "process_sets.py", 10, f"{victim}:step:4")
    check(job, {0, 1, 2, 3} - {victim}, 2, [[3, 2], [3, 2]])
    survivor = next(result for result in job.results if result["worker"] == 1)
    (start, loss) = survivor["changes"]
    assert (start["lost"], start["joined"]) == ([], [])
    assert (loss["lost"], loss["joined"]) == ([victim], [])
    assert all(change["first_step_seconds"] > 0 for change in survivor["changes"])


def test_a_rank_that_joins_knows_the_set_and_does_not_belong_to_it() -> None:
    """In between, the set has all ranks."""
    job = run_job(("-np", "3", "--min-np", "1", *QUICK), "process_sets.py", 12, "0:step:4", HOLD="8:3")
    check(job, {1, 2, 3}, 3, [[3, 2], [3, 2], [3, 2]])
    newest = next(result for result in job.results if result["worker"] == 3)
    assert len(newest["seen"]) == 1
    assert newest["seen"][0]["following"] is None
    oldest = next(result for result in job.results if result["worker"] == 1)
    assert oldest["changes"][2]["lost"] == []
    assert oldest["changes"][2]["joined"] == [newest["seen"][0]["rank"]]


def test_the_use_of_a_set_names_its_lost_rank_on_all_ranks() -> None:
    job = run_job(FOUR, "process_sets.py", 12, "2:step:4", HOLD="8:4")
    check(job, {0, 1, 3, 4}, 3, [[3, 2], None, None])


def test_a_removed_set_stays_removed_on_survivors_and_newcomers() -> None:
    job = run_job(FOUR, "process_sets.py", 12, "0:step:4", HOLD="8:4", REMOVE="2")
    assert job.code == 0, job.text
    assert {result["worker"] for result in job.results} == {1, 2, 3, 4}
    for result in job.results:
        text = "the process set of ranks [1, 2] cannot be used: it has been removed"
        assert result["seen"][-1]["following"] == text


def test_ranks_that_add_different_sets_end_the_job_with_both() -> None:
    job = run_job(FOUR, "process_sets.py", 5, "2:other:0")
    assert job.code == 1
    assert (
        "rank 2 has added process sets of the ranks [[0, 2]] before hvd.elastic.run, but rank 0 [[1, 2]]: "
        "all ranks have to add the same sets in the same order"
    ) in " ".join(job.text.split())


def test_a_layer_of_torch_goes_on_with_its_set() -> None:
    pytest.importorskip("torch")
    options = ("-np", "3", "--min-np", "1", "--blacklist-cooldown-range", "60", "60")
    job = run_job(options, "torch_process_sets.py", 12, 0, 5)
    assert job.code == 0, job.text
    assert {result["worker"] for result in job.results} == {1, 2}
    assert all(result["sizes"] == [2, 3] for result in job.results)
    assert all(result["ranks"] == [0, 1] for result in job.results)
