"""Of several ranks that ended badly, the one whose end explains the others' is named."""

from __future__ import annotations

import pytest

from sirtaki._core.bootstrap.messages import StoreEvent
from sirtaki.runner.culprit import Ending, Inquiry

SIGTERM, SIGKILL, SIGSEGV = 15, 9, 11


def inquire(*happenings: Ending | StoreEvent | int, size: int = 3) -> Inquiry:
    """An inquiry after these endings, events, and signals that hvdrun sent, in this order."""
    inquiry = Inquiry(start_timeout=120.0)
    for rank in range(size):
        inquiry.note_start(rank, 70 + rank)
    for happening in happenings:
        if isinstance(happening, Ending):
            inquiry.note_ending(happening)
        elif isinstance(happening, StoreEvent):
            inquiry.note_event(happening)
        else:
            inquiry.note_signal(happening)
    return inquiry


def ended(rank: int, code: int = 0, killed_by: int = 0) -> Ending:
    return Ending(rank, 70 + rank, code, killed_by)


def told(rank: int, kind: str, text: str = "", generation: int = 1) -> StoreEvent:
    return StoreEvent(kind, rank, generation, text)


def test_the_origin_of_the_first_abort_comes_first() -> None:
    inquiry = inquire(
        told(1, "aborted", "bad"), told(2, "aborted"), ended(2, 1), ended(0, killed_by=SIGSEGV), ended(1, 3)
    )
    verdict = inquiry.verdict()
    assert (verdict.rank, verdict.exit_code) == (1, 3)
    assert verdict.text == "rank 1 (pid 71) failed with exit code 3"
    assert inquiry.conclusive


def test_the_origin_of_an_abort_is_named_even_if_it_does_not_end() -> None:
    inquiry = inquire(told(1, "aborted", "ValueError: no data"), ended(2, 1))
    assert not inquiry.conclusive
    assert inquiry.verdict().text == "rank 1 (pid 71) gave up: ValueError: no data"
    assert inquiry.verdict().exit_code == 1


def test_an_abort_that_the_job_got_over_is_forgotten() -> None:
    inquiry = inquire(
        told(1, "aborted"),
        told(0, "initialised", generation=2),
        ended(0, 5),
        told(1, "peer_lost"),
        ended(1, 1),
    )
    assert inquiry.verdict().rank == 0


def test_then_a_death_by_a_signal_that_hvdrun_did_not_send() -> None:
    inquiry = inquire(ended(0, 1), ended(2, killed_by=SIGKILL))
    assert inquiry.conclusive
    verdict = inquiry.verdict()
    assert (verdict.rank, verdict.exit_code) == (2, 137)
    text = "rank 2 (pid 72) was killed by signal 9 (SIGKILL): often the machine ran out of memory"
    assert verdict.text == text


def test_a_death_by_hvdruns_own_signal_proves_nothing() -> None:
    inquiry = inquire(SIGTERM, ended(0, killed_by=SIGTERM), ended(1, 4))
    assert inquiry.verdict().rank == 1


def test_then_the_earliest() -> None:
    inquiry = inquire(ended(0), ended(2, 4), ended(1, 3))
    assert not inquiry.conclusive
    assert (inquiry.verdict().rank, inquiry.verdict().exit_code) == (2, 4)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_who_only_lost_another_rank_is_never_the_culprit(order: tuple[int, int]) -> None:
    endings = {0: ended(0, 1), 1: ended(1, 3)}
    inquiry = inquire(told(0, "peer_lost"), *(endings[rank] for rank in order))
    assert inquiry.verdict().rank == 1


def test_if_there_is_nobody_else_the_loss_is_what_is_told() -> None:
    verdict = inquire(ended(1), told(0, "peer_lost"), ended(0, 1)).verdict()
    assert verdict.text == "rank 0 (pid 70) failed with exit code 1, because it had lost another rank"
    assert verdict.exit_code == 1


def test_ranks_that_did_not_come() -> None:
    overdue = StoreEvent("overdue", 1, 1, "", (1, 2))
    verdict = inquire(told(0, "arrived"), overdue, ended(0, 1)).verdict()
    assert verdict.text.startswith(
        "rank 1 (pid 71) and rank 2 (pid 72) have not called hvd.init(); another rank"
    )
    assert verdict.exit_code == 1


def test_a_rank_that_failed_before_it_came_is_the_culprit() -> None:
    overdue = StoreEvent("overdue", 1, 1, "", (1,))
    assert inquire(overdue, ended(0, 1), ended(1, 7)).verdict().exit_code == 7


def test_all_is_well() -> None:
    assert not inquire(ended(0), ended(1), ended(2)).failed


def test_a_rank_that_left_without_a_goodbye_is_named() -> None:
    both = [told(0, "initialised"), told(1, "initialised")]
    verdict = inquire(*both, ended(1), told(0, "peer_lost"), ended(0, 1)).verdict()
    assert verdict.text.startswith("rank 1 (pid 71) ended with exit code 0, but without hvd.shutdown()")
    assert verdict.exit_code == 1
    verdict = inquire(*both, told(1, "finished"), ended(1), told(0, "peer_lost"), ended(0, 1)).verdict()
    assert verdict.rank == 0
