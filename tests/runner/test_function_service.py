"""The service of sirtaki.run's launcher: the requests of ranks, and the file of results."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator

import pytest

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.bootstrap.job import Identity, Job, RendezvousError, RendezvousTimeout
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.runner.function.service import (
    PIECE_BYTES,
    FunctionService,
    RankEnd,
    Summary,
    read_outcome,
    read_summary,
)
from sirtaki.runner.function.worker import LauncherConnection, LauncherGone

HELLO = Frame.of(MessageKind.HELLO, {"host": "hostA", "pid": 7, "python": "CPython 3.12"})
RETURNED = Frame.of(MessageKind.OUTCOME, {"kind": "returned"})
COMPLETE = Frame(MessageKind.COMPLETE)


def read(number: int) -> Frame:
    return Frame(MessageKind.READ, number=number)


def piece(payload: bytes) -> Frame:
    return Frame(MessageKind.PIECE, payload=payload)


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    """Yields the descriptors of a call and of results."""
    both = os.memfd_create("call"), os.memfd_create("results")
    yield both
    for one in both:
        os.close(one)


@pytest.fixture
def service(files: tuple[int, int]) -> FunctionService:
    return FunctionService(*files, ["/modules"], "CPython 3.12")


def test_a_call_is_read_in_pieces(files: tuple[int, int], service: FunctionService) -> None:
    content = os.urandom(PIECE_BYTES) + b"end"
    os.write(files[0], content)
    assert json.loads(service.answer(0, HELLO)) == {"size": PIECE_BYTES + 3, "path": ["/modules"]}
    assert service.answer(0, read(0)) == content[:PIECE_BYTES]
    assert service.answer(0, read(PIECE_BYTES)) == b"end"


def test_outcomes_of_several_ranks_come_at_the_same_time(
    files: tuple[int, int], service: FunctionService
) -> None:
    for rank in (0, 1):
        service.answer(rank, HELLO)
        service.answer(rank, RETURNED)
    for part in (b"ab", b"cd", b"e"):
        for rank in (0, 1):
            service.answer(rank, piece(part if rank else part.upper()))
    service.answer(1, COMPLETE)
    service.note_size(2)
    service.close()
    summary = read_summary(files[1])
    assert summary is not None
    assert (summary.size, summary.error, summary.failure) == (2, "", None)
    assert [bytes(read_outcome(files[1], summary.outcomes[rank])) for rank in (0, 1)] == [b"ABCDE", b"abcde"]
    assert [summary.outcomes[rank].is_complete for rank in (0, 1)] == [False, True]
    assert (service.has_outcome(0), service.has_outcome(1), service.has_outcome(None)) == (False, True, False)


def test_another_outcome_replaces_one_that_has_not_ended(
    files: tuple[int, int], service: FunctionService
) -> None:
    for request in (
        HELLO,
        RETURNED,
        piece(b"half"),
        Frame.of(MessageKind.OUTCOME, {"kind": "raised"}),
        piece(b"all"),
        COMPLETE,
    ):
        service.answer(3, request)
    service.note_failure("rank 3 failed", 3)
    service.close()
    expected = RankEnd("hostA", 7, {"kind": "raised"}, [[4, 3]], True)  # type: ignore[list-item]
    assert read_summary(files[1]) == Summary("", "rank 3 failed", 3, {3: expected})
    assert read_outcome(files[1], expected) == b"all"


def test_last_ranks_and_the_first_error(files: tuple[int, int], service: FunctionService) -> None:
    service.note_ranks({0: 0, 1: 1, 2: 0, 3: 1})
    service.note_error("first")
    service.note_error("second")
    service.close()
    assert read_summary(files[1]) == Summary("first", last_ranks={0: 0, 1: 1, 2: 0, 3: 1})


@pytest.mark.parametrize(
    "requests",
    [
        [read(0)],  # before it has said what it is
        [Frame(MessageKind.HELLO, payload=b"{")],
        [Frame(MessageKind.HELLO, payload=b"[" * 60_000)],
        [Frame(MessageKind.HELLO, payload=b"[]")],
        [HELLO, read(2**64 - 1)],
        [HELLO, piece(b"result")],  # of no outcome
        [HELLO, COMPLETE],
        [HELLO, RETURNED, COMPLETE, piece(b"more")],
    ],
)
def test_malformed_requests(service: FunctionService, requests: list[Frame]) -> None:
    *before, last = requests
    for request in before:
        service.answer(0, request)
    with pytest.raises(RendezvousError):
        service.answer(0, last)


def test_another_version_of_python() -> None:
    with pytest.raises(
        RendezvousError, match=r"^rank 4 on hostA runs CPython 3\.12, but the function comes from "
    ):
        FunctionService(0, 0, [], "CPython 3.13").answer(4, HELLO)


def test_results_without_room(service: FunctionService, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    service.answer(0, HELLO)
    service.answer(0, RETURNED)
    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(RendezvousError, match="the launcher has no memory for the results"):
        service.answer(0, piece(b"result"))


@pytest.mark.parametrize(
    "content", [b"", b"short", b"results that have no end", bytes(8), b"x" + bytes(7) + b"\1"]
)
def test_a_launcher_that_was_killed(files: tuple[int, int], content: bytes) -> None:
    os.write(files[1], content)
    assert read_summary(files[1]) is None


def test_a_rank_waits_for_its_launcher_as_long_as_the_start_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: str, job: Job, mine: Identity, start_timeout: float = 120.0) -> RendezvousClient:
        raise RendezvousTimeout(f"{mine.rank} of {job.size} waited for {address} for {start_timeout} s")

    for name, value in {
        "RANK": "1",
        "SIZE": "2",
        "RENDEZVOUS": "127.0.0.1:7",
        "LAUNCHER": "hvdrun",
        "JOB": "job",
        "KEY": "aa" * 32,
        "START_TIMEOUT": "7.5",
    }.items():
        monkeypatch.setenv(f"SIRTAKI_{name}", value)
    monkeypatch.setattr(RendezvousClient, "connect", connect)
    with pytest.raises(LauncherGone, match=r"^1 of 2 waited for 127\.0\.0\.1:7 for 7\.5 s$"):
        LauncherConnection()
