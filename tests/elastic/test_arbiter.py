"""The arbiter's state machine: random jobs of simulated workers in virtual time, and each rule by itself."""

from __future__ import annotations

import os

from elastic.arbiter_job import Job, finish, opened, place
from elastic.simulation import Simulation

from sirtaki.bindings.bootstrap.elastic.messages import (
    Change,
    Counted,
    Drain,
    End,
    LeaveAt,
    Over,
    Returned,
)
from sirtaki.runner.elastic.arbiter.model import Action, Close, Finish, Kill, Open, Send, Slot, Start
from sirtaki.runner.elastic.arbiter.policy import Slots

JOBS = int(os.environ.get("SIRTAKI_ELASTIC_JOBS", "3000"))
FIRST = int(os.environ.get("SIRTAKI_ELASTIC_SEED", "0"))


def test_random_jobs() -> None:
    codes, with_hosts_left_out = [], 0
    for seed in range(FIRST, FIRST + JOBS):
        try:
            job = Simulation(seed)
            codes.append(job.run().code)
            with_hosts_left_out += job.has_left_out
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error or type(error).__name__}") from error
    # Jobs of all kinds were played.
    assert ({0, 1} <= set(codes) and with_hosts_left_out) or JOBS < 300


# ---- The start -----------------------------------------------------------------------------------------


def test_the_first_generation_waits_for_all_workers_of_the_start() -> None:
    job = Job(start=2, slots=3)
    assert job.started == [Start(0, job.slots[0]), Start(1, job.slots[1])]
    assert job.enlists_new(1) == []
    places = (place(0, 0, [0], [0, 1]), place(1, 0, [0], [0, 1]))
    assert job.enlists_new(0) == [Close(), Open(1, (0, 1), places)]
    assert job.receives_all(0, 1) == [Start(2, job.slots[2])]  # one more has room, once the ranks train


def test_the_start_goes_on_with_the_minimum_after_the_timeout() -> None:
    job = Job(start=2, slots=2, timeout=30.0)
    job.enlists_new(0)
    assert job.ticks(10.0) == []
    assert job.said == ["2 ranks are needed, and 1 is here: waiting for more, up to 30 s (--elastic-timeout)"]
    assert job.arbiter.due == 30.0
    assert opened(job.ticks(30.0)).members == (0,)


def test_a_start_without_any_answer_ends_after_the_timeout() -> None:
    job = Job(start=2, slots=2, minimum=2, timeout=30.0)
    assert job.arbiter.due == 10.0
    job.ticks(10.0)
    assert finish(job.ticks(30.0)) == Finish(1, "2 ranks are needed, and 0 were there after 30 s")


def test_a_worker_killed_at_the_start_is_replaced_after_a_pause() -> None:
    job = Job(start=1, slots=1)
    assert job.loses(0) == []
    assert job.arbiter.due == 1.0
    assert job.ticks(1.0) == [Start(1, job.slots[0])]


def test_a_job_whose_slots_go_before_it_starts_waits_for_others() -> None:
    job = Job(start=1, slots=1)
    assert job.sets_slots([]) == [Kill(0)]
    assert job.loses(0) == []
    assert job.at(1.0).sets_slots(job.slots) == [Start(1, job.slots[0])]


# ---- Losses --------------------------------------------------------------------------------------------


def test_survivors_of_a_loss_go_on_from_the_newest_commit() -> None:
    job = Job(start=3, slots=3).trains()
    over = Over(1, "rank 1 was lost (killed by signal 9)")
    assert job.loses(1) == [Send(0, over), Send(2, over), Close()]
    assert job.leaves(0, "lost", 4) == []
    orders = job.leaves(2, "lost", 5)  # it has counted the commit that rank 0 has not
    rest = {"generation": 2, "initial": 3, "text": over.text}
    places = (place(0, 5, [0], [2, 0], **rest), place(1, 5, [0], [2, 0], **rest))
    assert orders == [Close(), Open(2, (2, 0), places, 0.0)]


def test_a_lost_worker_is_replaced_and_joins_by_a_planned_change() -> None:
    job = Job(start=2, slots=2).trains()
    job.at(10.0).loses(1)
    job.leaves(0, "lost", 3)
    assert job.receives_all(0) == []
    assert job.arbiter.due == 11.0
    assert job.ticks(11.0) == [Start(2, job.slots[1])]
    assert job.enlists_new(2) == [Send(0, Change(2, 1))]
    assert job.receives(0, Counted(2, 1, 7)) == [Send(0, LeaveAt(2, 8))]
    orders = job.leaves(0, "changed", 9)
    rest = {"generation": 3, "workers": [0, 2], "joined": 1, "text": "1 rank joins"}
    places = (place(0, 9, [0], [0, 1], **rest), place(1, 9, [0], [0, 1], **rest))
    assert orders == [Close(), Open(3, (0, 2), places, 11.0)]


def test_all_leave_after_the_highest_count() -> None:
    job = Job(start=3, slots=4).trains()
    assert job.enlists_new(3) == [Send(one, Change(1, 1)) for one in range(3)]
    assert job.receives(1, Counted(1, 1, 4)) == []
    assert job.receives(0, Counted(1, 1, 6)) == []
    assert job.receives(2, Counted(1, 1, 5)) == [Send(one, LeaveAt(1, 7)) for one in range(3)]


def test_workers_that_are_starting_are_awaited_for_a_moment() -> None:
    job = Job(start=1, slots=3).trains()
    assert job.enlists_new(1) == []
    assert job.arbiter.due == 0.5
    assert job.ticks(0.5) == [Send(0, Change(1, 1))]


def test_a_change_waits_no_longer_than_for_the_last_worker_that_is_starting() -> None:
    job = Job(start=1, slots=3).trains()
    assert job.enlists_new(1) == []
    assert job.enlists_new(2) == [Send(0, Change(1, 1))]


def test_a_slot_cools_down_longer_with_each_loss() -> None:
    job = Job(start=1, slots=2, cooldown=(4.0, 10.0)).trains()
    moments = []
    for worker in range(1, 6):
        job.loses(worker)
        moments.append(job.arbiter.due)
        assert job.ticks(job.now + 100.0) == [Start(worker + 1, job.slots[1])]
    assert moments == [1.0, 104.0, 208.0, 310.0, 410.0]


def test_the_reset_limit_counts_losses() -> None:
    job = Job(start=3, slots=3, reset_limit=1).trains()
    assert not [one for one in job.loses(0) if isinstance(one, Finish)]
    text = "2 ranks were lost, and --reset-limit allows 1; the last: rank 1"
    assert finish(job.loses(1)) == Finish(1, text, 1)


def test_the_loss_of_all_ranks_ends_the_job_although_a_new_worker_waits() -> None:
    job = Job(start=1, slots=2).trains()
    job.enlists_new(1)
    text = "all ranks were lost; the last one is rank 0: killed by signal 9"
    assert finish(job.loses(0)) == Finish(1, text, 0)


def test_a_new_rank_that_never_received_the_state_does_not_start_anew() -> None:
    job = Job(start=1, slots=2).trains()
    job.enlists_new(1)
    job.ticks(0.5)
    job.receives(0, Counted(1, 1, 0))
    assert opened(job.leaves(0, "changed", 6)).members == (0, 1)
    job.loses(0)  # while both link
    orders = job.leaves(1, "lost", -1, False)
    assert finish(orders) == Finish(1, "all ranks that had the state of the training were lost")


def test_a_commit_that_nobody_can_restore_ends_the_job() -> None:
    job = Job(start=3, slots=3).trains()
    job.loses(2)
    job.leaves(0, "lost", 4)
    orders = job.leaves(1, "lost", 5, False)
    assert "no rank can return to commit 5, the last one of rank 1" in finish(orders).text


def test_a_new_worker_that_fails_is_no_loss() -> None:
    job = Job(start=1, slots=2, reset_limit=0).trains()
    assert job.sees_exit(1, 1) == []
    assert job.said == ["the process in slot localhost:1 was lost: failed with exit code 1"]
    assert job.ticks(1.0) == [Start(2, job.slots[1])]


def test_a_rank_that_others_blame_is_given_up() -> None:
    job = Job(start=2, slots=2).trains()
    orders = job.leaves(0, "lost", 2, culprit=1, kind="timeout", text="rank 1 is late")
    assert orders == [Send(1, Over(1, "the ranks have lost their links to each other")), Close(), Kill(1)]
    assert opened(job.loses(1)).members == (0,)


def test_a_rank_that_does_not_leave_is_given_up() -> None:
    job = Job(start=3, slots=3, patience=60.0).trains()
    job.loses(2)
    job.leaves(0, "lost", 2)
    assert job.arbiter.due == 10.0
    assert job.ticks(10.0) == []
    assert job.said[-1] == "waiting for rank 1 to notice that the ranks change, or to return to its commit"
    assert job.ticks(60.0) == [Kill(1)]
    assert opened(job.loses(1)).members == (0,)


def test_a_wait_for_workers_does_not_count_the_wait_for_members() -> None:
    job = Job(start=3, slots=3, minimum=2, patience=60.0, timeout=60.0).trains()
    job.sets_slots(job.slots[:1])  # nothing will be replaced
    job.loses(2)
    job.leaves(0, "lost", 2)
    assert job.ticks(60.0) == [Kill(1)]
    assert job.loses(1) == []
    job.ticks(70.0)
    assert job.arbiter.due == 120.0
    assert "2 ranks are needed, and 1 was there after 60 s" in finish(job.ticks(120.0)).text


def test_ranks_that_cannot_link_end_the_job_at_last() -> None:
    job = Job(start=2, slots=2).trains()
    job.leaves(0, "lost", 1, culprit=1, kind="peer_lost")
    orders = job.leaves(1, "lost", 1, culprit=0, kind="peer_lost")
    for _ in range(10):
        assert opened(orders).members == (0, 1)
        assert not [one for one in orders if isinstance(one, Finish)]
        orders = job.leaves(0, "lost", 1, kind="link", text="no route")
        if not [one for one in orders if isinstance(one, Finish)]:
            orders = job.leaves(1, "lost", 1, kind="link", text="no route")
    assert finish(orders).code == 1
    assert finish(orders).text.endswith(
        "the ranks have begun 10 times from commit 1, and none of them was lost: no route"
    )


def test_ranks_that_link_and_fail_again_end_the_job_at_last() -> None:
    job = Job(start=2, slots=2).trains()
    rounds = 0
    while not (ends := [one for one in blame_rank_1(job) if isinstance(one, Finish)]):
        rounds += 1
        assert rounds < 30
        job.receives_all(0, 1)
    assert rounds == 10
    assert "the ranks have begun 10 times from commit 1" in ends[0].text
    assert ends[0].text.endswith("none of them was lost: it is late")


def test_each_further_commit_is_progress() -> None:
    job = Job(start=2, slots=2).trains()
    for commit in range(30):
        assert opened(blame_rank_1(job, commit)).members == (0, 1)
        job.receives_all(0, 1)


def blame_rank_1(job: Job, commit: int = 1) -> list[Action]:
    """Returns the orders after both ranks blame rank 1, which lives, and reports it first."""
    failure = {"culprit": 1, "kind": "timeout", "text": "it is late"}
    return job.leaves(1, "lost", commit, **failure) + job.leaves(0, "lost", commit, **failure)


# ---- Drains --------------------------------------------------------------------------------------------


def test_a_drained_rank_leaves_at_a_change_and_keeps_its_slot_until_its_process_has_ended() -> None:
    job = Job(start=2, slots=2).trains()
    assert job.receives(1, Drain(1)) == [Send(0, Change(1, 1)), Send(1, Change(1, 1))]
    job.receives(0, Counted(1, 1, 3))
    assert job.receives(1, Counted(1, 1, 3)) == [Send(0, LeaveAt(1, 4)), Send(1, LeaveAt(1, 4))]
    job.leaves(0, "changed", 4)
    orders = job.leaves(1, "changed", 4)
    assert orders[0] == Send(1, End(0, "it has left"))
    assert opened(orders).members == (0,)
    assert job.receives_all(0) == []
    assert job.sees_exit(1) == [Start(2, job.slots[1])]
    assert job.arbiter.losses == 0


def test_ranks_whose_slots_were_gone_for_a_moment_do_not_leave() -> None:
    job = Job(start=3, slots=3).trains()
    job.sets_slots([])  # the script has read a file that was being written
    job.sets_slots(job.slots)
    job.loses(1)
    job.leaves(0, "lost", 4)
    orders = job.leaves(2, "lost", 4)
    assert job.said[-1] == "2 ranks from commit 4 on: rank 1 was lost (killed by signal 9)"
    assert opened(orders).places[0].text == "rank 1 was lost (killed by signal 9)"


def test_a_rank_that_leaves_is_named() -> None:
    job = Job(start=2, slots=2).trains()
    job.receives(1, Drain(1))
    job.leaves(0, "changed", 4)
    job.leaves(1, "changed", 4)
    assert job.said == ["1 rank from commit 4 on: rank 1 leaves"]


def test_a_drained_rank_makes_room_if_the_others_are_too_few() -> None:
    job = Job(start=2, slots=2, minimum=2).trains()
    job.receives(1, Drain(1))
    job.leaves(0, "changed", 4)
    assert job.leaves(1, "changed", 4) == [Send(1, End(0, "it has left"))]
    assert job.sees_exit(1) == [Start(2, job.slots[1])]
    assert opened(job.enlists_new(2)).members == (0, 2)


def test_the_only_source_stays_for_one_more_generation() -> None:
    job = Job(start=1, slots=2).trains()
    assert job.receives(0, Drain(1)) == []  # nobody else has the state
    assert job.enlists_new(1) == [Send(0, Change(1, 1))]
    job.receives(0, Counted(1, 1, 2))
    assert opened(job.leaves(0, "changed", 5)).members == (0, 1)
    orders = job.receives_all(0, 1)
    assert orders == [Send(0, Change(2, 1)), Send(1, Change(2, 1))]
    job.leaves(1, "changed", 6)
    orders = job.leaves(0, "changed", 6)
    assert orders[0] == Send(0, End(0, "it has left"))
    assert opened(orders).members == (1,)


def test_a_drained_rank_that_fails_ends_the_job() -> None:
    job = Job(start=1, slots=1).trains()
    job.receives(0, Drain(1))
    assert finish(job.sees_exit(0, 3)) == Finish(3, "rank 0 failed with exit code 3", 0)


def test_a_drained_rank_with_the_newest_commit_is_not_passed_over() -> None:
    job = Job(start=3, slots=3).trains()
    job.receives(0, Drain(1))
    job.loses(2)
    job.leaves(0, "lost", 5, False)
    assert "no rank can return to commit 5" in finish(job.leaves(1, "lost", 4)).text


# ---- The end -------------------------------------------------------------------------------------------


def test_the_job_ends_well_when_all_have_returned_and_ended() -> None:
    job = Job(start=2, slots=4).trains()
    job.enlists_new(2)  # and worker 3 is starting
    assert job.receives(0, Returned(1)) == [Send(2, End(0, "the training has ended")), Kill(3)]
    assert job.arbiter.due is None  # the change that was to come is off
    assert job.receives(1, Returned(1)) == []
    assert [job.sees_exit(one) for one in (0, 2, 3)] == [[], [], []]
    assert job.sees_exit(1) == [Finish(0, "")]


def test_a_return_calls_a_change_off() -> None:
    job = Job(start=2, slots=3).trains()
    job.enlists_new(2)
    job.ticks(0.5)
    job.receives(0, Counted(1, 1, 8))
    off = LeaveAt(1, 0)
    assert job.receives(1, Returned(1)) == [Send(0, off), Send(2, End(0, "the training has ended"))]


def test_survivors_end_the_training_below_the_minimum() -> None:
    job = Job(start=3, slots=3, minimum=3).trains()
    job.receives(0, Returned(1))
    job.loses(1)
    assert opened(job.leaves(2, "lost", 4)).members == (2,)


def test_the_end_does_not_wait_for_more_workers() -> None:
    job = Job(start=3, slots=3, timeout=60.0).trains()
    job.receives(0, Returned(1))
    job.loses(1)
    job.receives(2, Returned(1))
    assert job.arbiter.due is None
    assert job.ticks(1000.0) == []
    job.sees_exit(0)
    assert job.sees_exit(2) == [Finish(0, "")]


def test_a_rank_that_fails_after_its_return_ends_the_job() -> None:
    job = Job(start=2, slots=2).trains()
    job.receives(0, Returned(1))
    job.receives(1, Returned(1))
    assert finish(job.sees_exit(0, 5)) == Finish(5, "rank 0 failed with exit code 5", 0)


def test_a_lost_rank_costs_its_whole_host_if_the_user_says_so() -> None:
    job = Job(start=3, slots=3, domain="host").trains()
    over = Over(1, "rank 1 was lost (killed by signal 9)")
    orders = job.loses(1)
    assert [one for one in orders if isinstance(one, Kill)] == [Kill(0), Kill(2)]
    assert Send(0, over) in orders


def test_pauses_stay_within_their_limit_however_many_losses_there_are() -> None:
    slot = Slot("localhost", 0)
    slots = Slots([slot], (1.0, 60.0))
    for _ in range(2000):
        slots.note_loss(slot, 100.0)
    assert slots.due(()) == 160.0
