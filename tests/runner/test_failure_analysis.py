"""If several ranks end with an error, the verdict names the rank whose end explains the others'."""

from __future__ import annotations

import pytest

from sirtaki.bindings.bootstrap.messages import RankEvent
from sirtaki.runner.supervise.failure_analysis import ExitStatus, FailureAnalyzer

SIGTERM, SIGKILL, SIGSEGV = 15, 9, 11


def inquire(*happenings: ExitStatus | RankEvent | int, size: int = 3) -> FailureAnalyzer:
    """Returns an analyzer after these endings, events, and signals that hvdrun sent, in this order."""
    analyzer = FailureAnalyzer(size, start_timeout=120.0)
    for rank in range(size):
        analyzer.note_start(rank, 70 + rank)
    for happening in happenings:
        if isinstance(happening, ExitStatus):
            analyzer.note_exit(happening)
        elif isinstance(happening, RankEvent):
            analyzer.note_event(happening)
        else:
            analyzer.note_signal(happening)
    return analyzer


def ended(rank: int, code: int = 0, killed_by: int = 0) -> ExitStatus:
    return ExitStatus(rank, code, killed_by)


def told(rank: int, kind: str, text: str = "", generation: int = 1) -> RankEvent:
    return RankEvent(kind, rank, generation, text)


def test_a_death_by_a_signal_that_hvdrun_did_not_send_outranks_an_abort() -> None:
    analyzer = inquire(told(1, "aborted", "ValueError: ABORTED"), ended(1, 1), ended(0, killed_by=SIGSEGV))
    failure = analyzer.failure()
    assert (failure.rank, failure.exit_code) == (0, 139)
    assert analyzer.conclusive


def test_then_the_origin_of_the_first_abort_with_what_it_raised() -> None:
    analyzer = inquire(
        told(1, "aborted", "KeyError: 'x' (at train.py:4)\nmore"),
        told(2, "aborted"),
        ended(2, 1),
        ended(1, 3),
    )
    failure = analyzer.failure()
    assert (failure.rank, failure.exit_code) == (None, 3)  # its last lines would repeat the text
    assert failure.text == "rank 1 (pid 71) failed with exit code 3: KeyError: 'x' (at train.py:4)"
    assert analyzer.conclusive


def test_the_origin_of_an_abort_is_named_even_if_it_does_not_end() -> None:
    analyzer = inquire(told(1, "aborted", "ValueError: no data"), ended(2, 1))
    assert not analyzer.conclusive
    assert analyzer.failure().text == "rank 1 (pid 71) gave up: ValueError: no data"
    assert analyzer.failure().exit_code == 1


def test_a_reason_that_comes_after_the_decision_is_added() -> None:
    analyzer = inquire(ended(1, 3), ended(2, 1))
    failure = analyzer.failure()
    assert (failure.text, failure.rank) == ("rank 1 (pid 71) failed with exit code 3", 1)
    assert analyzer.with_late_reason(failure) == failure
    analyzer.note_event(told(1, "aborted", "ValueError: no data"))
    late = analyzer.with_late_reason(failure)
    assert (late.text, late.rank) == ("rank 1 (pid 71) failed with exit code 3: ValueError: no data", None)
    assert (late.exit_code, late.culprit) == (3, 1)
    assert analyzer.with_late_reason(late) == late


def test_the_late_reason_of_another_rank_changes_nothing() -> None:
    analyzer = inquire(ended(1, 3))
    failure = analyzer.failure()
    analyzer.note_event(told(2, "aborted", "KeyboardInterrupt"))
    assert analyzer.with_late_reason(failure) == failure


def test_an_abort_that_the_job_got_over_is_forgotten() -> None:
    analyzer = inquire(
        told(1, "aborted"),
        told(0, "initialised", generation=2),
        ended(0, 5),
        told(1, "peer_lost"),
        ended(1, 1),
    )
    assert analyzer.failure().rank == 0


LATE = {"status": "timeout", "culprit": 1, "reason": "given up after 3 seconds: rank 1 is at train.py:9"}


def test_the_rank_that_was_awaited_is_named_and_not_those_that_waited() -> None:
    analyzer = inquire(ended(0, 3), ended(2, 1))
    for rank in (0, 2):
        analyzer.note_report(rank, LATE)
    failure = analyzer.failure()
    assert failure.text == f"rank 1 (pid 71) kept other ranks waiting for too long: {LATE['reason']}"
    assert (failure.rank, failure.exit_code) == (None, 3)


def test_a_rank_whose_core_blames_another_is_innocent() -> None:
    analyzer = inquire(ended(0, 1), ended(1, 4))
    analyzer.note_report(0, {"status": "peer_lost", "culprit": 1, "reason": "rank 1 was lost"})
    assert analyzer.failure().rank == 1


@pytest.mark.parametrize("report", [{}, {"culprit": 9, "reason": ""}, {"culprit": [1], "reason": 3}])
def test_a_report_that_makes_no_sense_proves_nothing(report: dict[str, object]) -> None:
    analyzer = inquire(ended(0, 1))
    analyzer.note_report(0, report)
    assert analyzer.failure().rank == 0


def test_a_death_by_a_signal_is_named_before_ranks_that_failed() -> None:
    analyzer = inquire(ended(0, 1), ended(2, killed_by=SIGKILL))
    assert analyzer.conclusive
    failure = analyzer.failure()
    assert (failure.rank, failure.exit_code) == (2, 137)
    text = "rank 2 (pid 72) was killed by signal 9 (SIGKILL): often the machine ran out of memory"
    assert failure.text == text


def test_a_death_by_hvdruns_own_signal_proves_nothing() -> None:
    analyzer = inquire(SIGTERM, ended(0, killed_by=SIGTERM), ended(1, 4))
    assert analyzer.failure().rank == 1


def test_then_the_earliest() -> None:
    analyzer = inquire(ended(0), ended(2, 4), ended(1, 3))
    assert not analyzer.conclusive
    assert (analyzer.failure().rank, analyzer.failure().exit_code) == (2, 4)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_who_only_lost_another_rank_is_never_the_culprit(order: tuple[int, int]) -> None:
    statuses = {0: ended(0, 1), 1: ended(1, 3)}
    analyzer = inquire(told(0, "peer_lost"), *(statuses[rank] for rank in order))
    assert analyzer.failure().rank == 1


def test_if_there_is_nobody_else_the_loss_is_what_is_told() -> None:
    failure = inquire(ended(1), told(0, "peer_lost"), ended(0, 1)).failure()
    assert failure.text == "rank 0 (pid 70) failed with exit code 1: it had lost another rank"
    assert failure.exit_code == 1
    failure = inquire(ended(1), told(0, "peer_lost", "PeerFinishedError: rank 1"), ended(0, 1)).failure()
    assert failure.text == "rank 0 (pid 70) failed with exit code 1: PeerFinishedError: rank 1"


FINISHED = "PeerFinishedError: {} finished and cannot take part in 'g' (in step() at train.py:4)"
NEEDED = " while rank 0 (pid 70) still needed {} for tensor 'g' (in step() at train.py:4): the ranks made"


def test_ranks_that_ended_while_another_needed_them_are_named() -> None:
    one = told(0, "peer_lost", FINISHED.format("rank 1 (pid 71 on a) has"))
    failure = inquire(told(1, "finished"), ended(1), one, ended(0, 1), size=2).failure()
    assert failure.text.startswith("rank 1 (pid 71 on a) ended with exit code 0" + NEEDED.format("it"))
    assert (failure.exit_code, failure.rank, failure.culprit) == (1, None, None)
    two = told(0, "peer_lost", FINISHED.format("rank 1 (pid 71 on a), rank 2 (pid 72 on b) have"))
    failure = inquire(ended(1), two, ended(0, 1), ended(2)).failure()
    subject = "rank 1 (pid 71 on a), rank 2 (pid 72 on b) ended with exit code 0"
    assert failure.text.startswith(subject + NEEDED.format("them"))


def test_a_rank_that_finished_and_still_runs_has_no_exit_code() -> None:
    one = told(0, "peer_lost", FINISHED.format("rank 1 (pid 71 on a) has"))
    failure = inquire(told(1, "finished"), one, ended(0, 1), size=2).failure()
    assert failure.text.startswith("rank 1 (pid 71 on a) had finished" + NEEDED.format("it"))


THREAD = "an exception ended its thread 'Thread-1': KeyError: 7 (in work() at train.py:6)"


def test_exceptions_that_ended_threads_are_a_notice_of_a_job_that_ended_well() -> None:
    one = (told(1, "arrived"), told(1, "thread_failed", THREAD), ended(0), ended(1))
    analyzer = inquire(*one, size=2)
    assert not analyzer.failed
    assert analyzer.notice == f"rank 1 (pid 71) went on after a failure, and ended with exit code 0: {THREAD}"
    assert inquire(*one, told(0, "thread_failed", "x"), size=2).notice.endswith(
        f"{THREAD}; so did 1 more rank"
    )


def test_a_rank_without_its_thread_is_named_with_the_exception_if_another_needed_it() -> None:
    needed = told(0, "peer_lost", FINISHED.format("rank 1 (pid 71 on a) has"))
    failed = told(1, "thread_failed", THREAD)
    failure = inquire(failed, told(1, "finished"), ended(1), needed, ended(0, 1), size=2).failure()
    assert failure.text.startswith("rank 1 (pid 71 on a) ended with exit code 0 while rank 0 (pid 70)")
    assert failure.text.endswith(f"(in step() at train.py:4): {THREAD}")


def test_ranks_that_did_not_come() -> None:
    overdue = RankEvent("overdue", 1, 1, "", (1, 2))
    failure = inquire(told(0, "arrived"), overdue, ended(0, 1)).failure()
    assert failure.text.startswith(
        "rank 1 (pid 71) and rank 2 (pid 72) have not called hvd.init(); another rank"
    )
    assert failure.exit_code == 1


def test_a_rank_that_left_init_is_named_with_the_events_own_text() -> None:
    text = "1 of 3 ranks are here; waiting for rank 1, but rank 1 has gone"
    failure = inquire(told(1, "arrived"), RankEvent("departed", 1, 1, text, (1,)), ended(0, 1)).failure()
    assert failure.text == f"rank 1 (pid 71) has left hvd.init(): {text}"


def test_a_rank_that_failed_before_it_came_is_the_culprit() -> None:
    overdue = RankEvent("overdue", 1, 1, "", (1,))
    assert inquire(overdue, ended(0, 1), ended(1, 7)).failure().exit_code == 7


def test_all_is_well() -> None:
    assert not inquire(ended(0), ended(1), ended(2)).failed


def test_a_rank_that_left_without_a_goodbye_is_named() -> None:
    both = [told(0, "initialised"), told(1, "initialised")]
    failure = inquire(*both, ended(1), told(0, "peer_lost"), ended(0, 1)).failure()
    assert failure.text.startswith("rank 1 (pid 71) ended with exit code 0, but without hvd.shutdown()")
    assert failure.exit_code == 1
    failure = inquire(*both, told(1, "finished"), ended(1), told(0, "peer_lost"), ended(0, 1)).failure()
    assert failure.text.startswith("rank 0 (pid 70) failed with exit code 1: ")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_of_ranks_that_accuse_each_other_the_one_that_hvdrun_lost_is_named(
    order: tuple[int, ...],
) -> None:
    analyzer = inquire(
        *(told(rank, "initialised") for rank in range(3)),
        told(0, "disconnected"),
        told(1, "peer_lost", "rank 0 was lost"),
        told(2, "peer_lost", "rank 0 was lost"),
        *(ended(rank, 1) for rank in order),
    )
    for rank, other in ((0, 1), (1, 0), (2, 0)):
        analyzer.note_report(
            rank, {"status": "peer_lost", "culprit": other, "reason": f"rank {other} was lost"}
        )
    assert analyzer.failure().text.startswith(
        "rank 0 (pid 70) failed with exit code 1: all its connections were"
    )
    assert analyzer.failure().exit_code == 1


def test_a_rank_that_others_accuse_is_named_although_it_still_runs() -> None:
    """Its program may take seconds to end, and ends long after the ranks that it brought down."""
    analyzer = inquire(ended(0, 1))
    accusation = "rank 1 (pid 71) was lost: the connection to it broke"
    analyzer.note_report(0, {"status": "peer_lost", "culprit": 1, "reason": accusation})
    assert analyzer.failure().text == accusation
