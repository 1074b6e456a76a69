"""The descriptors of a host's ranks: passed to the lowest rank, and from there to everyone."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from launching import FAILSAFE_SECONDS
from open_files import open_files, opened_since

from sirtaki.bindings.bootstrap import memory
from sirtaki.bindings.bootstrap.job import RendezvousError, RendezvousTimeout
from sirtaki.bindings.bootstrap.memory import MemoryLinks
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.context import Context
from sirtaki.bindings.topology import SharedMemory

RANKS = [3, 4, 8, 9, 11]  # of one host


class Rank:
    """A context that notes the files behind the descriptors that it is handed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.slot = -1
        self.files: dict[str, list[tuple[int, int] | None]] = {}

    def link_memory(self, shared: SharedMemory) -> None:
        assert list(shared.ranks) == RANKS
        self.slot = shared.slot
        self.files = {
            "memory": [file_of(shared.descriptor)],
            "engine": list(map(file_of, shared.engine_doorbells)),
            "waiter": list(map(file_of, shared.waiter_doorbells)),
            "process": list(map(file_of, shared.process_descriptors)),
            "socket": list(map(file_of, shared.socket_descriptors)),
        }


class Rendezvous:
    """A connection over which a test reports the failure of a rank."""

    has_unread = False

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()

    def fail(self) -> None:
        self._there.sendall(b"F")

    def fileno(self) -> int:
        return self._here.fileno()

    def raise_failure(self, deadline: float) -> None:
        raise RendezvousError("rank 9 could not link", 9)

    def close(self) -> None:
        self._here.close()
        self._there.close()


def file_of(descriptor: int) -> tuple[int, int] | None:
    if descriptor < 0:
        return None
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


@pytest.fixture
def plain_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes doorbells and process descriptors files that differ: eventfds share one inode."""

    def make() -> int:
        return os.memfd_create("one")

    monkeypatch.setattr(memory, "_make_doorbell", make)
    monkeypatch.setattr(memory, "open_process", make)


class Host:
    """The ranks of a host in one process: connected to the lowest one, as init() connects them."""

    def __init__(self) -> None:
        self.rendezvous = Rendezvous()
        self.contexts = {rank: Rank(rank) for rank in RANKS}
        pairs = {rank: socket.socketpair() for rank in RANKS[1:]}
        self.sockets = {rank: {RANKS[0]: theirs} for rank, (_, theirs) in pairs.items()}
        self.sockets[RANKS[0]] = {rank: ours for rank, (ours, _) in pairs.items()}
        self._pool = ThreadPoolExecutor(len(RANKS))

    def exchange(self, rank: int, seconds: float = FAILSAFE_SECONDS) -> Any:
        links = MemoryLinks(
            cast(Context, self.contexts[rank]),
            RANKS,
            self.sockets[rank],
            cast(RendezvousClient, self.rendezvous),
        )
        return self._pool.submit(self._run, links, time.monotonic() + seconds)

    def close(self) -> None:
        for one in self.sockets.values():
            for connection in one.values():
                connection.close()
        self._pool.shutdown()
        self.rendezvous.close()

    def _run(self, links: MemoryLinks, deadline: float) -> None:
        own = os.memfd_create("memory") if links.context.rank == RANKS[0] else -1
        try:
            links.exchange(own, deadline)
        finally:
            if own >= 0:
                os.close(own)


@pytest.fixture
def host(plain_files: None) -> Iterator[Host]:
    with contextlib.closing(Host()) as one:
        yield one


@pytest.mark.parametrize("ranks_per_message", [2, 63])
def test_each_rank_receives_the_descriptors_of_all(
    host: Host, monkeypatch: pytest.MonkeyPatch, ranks_per_message: int
) -> None:
    monkeypatch.setattr(memory, "_RANKS_PER_MESSAGE", ranks_per_message)
    before = open_files()
    for ended in [host.exchange(rank) for rank in RANKS]:
        ended.result(FAILSAFE_SECONDS)
    assert opened_since(before) == {}  # the core has duplicated them
    lowest = host.contexts[RANKS[0]].files
    for kind in ("memory", "engine", "waiter", "process"):
        assert None not in lowest[kind]
        assert all(one.files[kind] == lowest[kind] for one in host.contexts.values())
    passed = [file for kind in ("memory", "engine", "waiter", "process") for file in lowest[kind]]
    assert len(set(passed)) == 1 + 3 * len(RANKS)
    assert [host.contexts[rank].slot for rank in RANKS] == list(range(len(RANKS)))
    for rank, context in host.contexts.items():
        watched = {RANKS[slot] for slot, file in enumerate(context.files["socket"]) if file is not None}
        assert watched == set(host.sockets[rank])


def test_a_rank_without_a_process_descriptor_passes_none(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "open_process", lambda: -1)
    for ended in [host.exchange(rank) for rank in RANKS]:
        ended.result(FAILSAFE_SECONDS)
    assert all(one.files["process"] == [None] * len(RANKS) for one in host.contexts.values())


def test_a_rank_that_ends_is_named_by_the_lowest_one(host: Host) -> None:
    host.sockets[9][3].close()
    with pytest.raises(RendezvousError, match="rank 9 is gone") as caught:
        host.exchange(3).result(FAILSAFE_SECONDS)
    assert caught.value.culprit == 9


def test_the_end_of_the_lowest_rank_ends_the_wait(host: Host) -> None:
    before = open_files()
    waiting = host.exchange(4)
    host.sockets[3][4].close()
    with pytest.raises(RendezvousError, match="rank 3 is gone"):
        waiting.result(FAILSAFE_SECONDS)
    assert opened_since(before) == {}


@pytest.mark.parametrize("rank", [3, 4])
def test_a_failure_elsewhere_ends_the_wait(host: Host, rank: int) -> None:
    waiting = host.exchange(rank)
    host.rendezvous.fail()
    with pytest.raises(RendezvousError, match="rank 9 could not link"):
        waiting.result(FAILSAFE_SECONDS)


def test_a_rank_that_passes_nothing_is_named_at_the_deadline(host: Host) -> None:
    with pytest.raises(RendezvousTimeout, match="ranks 4, 8, 9 and 11 did not pass"):
        host.exchange(3, seconds=0.05).result(FAILSAFE_SECONDS)


@pytest.mark.parametrize("masks", [b"\x01", b"\x13", b"\x0b", b"\x03\x03"])
def test_other_descriptors_than_announced_are_refused(host: Host, masks: bytes) -> None:
    before = open_files()
    with contextlib.closing(socket.socket()) as one:
        numbers = [one.fileno()] * (4 if len(masks) == 2 else 2)
        socket.send_fds(host.sockets[4][3], [masks], numbers)
        with pytest.raises(RendezvousError, match="rank 4 is gone"):
            host.exchange(3).result(FAILSAFE_SECONDS)
    assert opened_since(before) == {}


def test_descriptors_are_passed_again_while_too_many_are_in_flight(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = iter([OSError(errno.ETOOMANYREFS, "")] * 3)
    send_fds = socket.send_fds

    def refuse(*arguments: Any) -> int:
        for refusal in refusals:
            raise refusal
        return send_fds(*arguments)

    monkeypatch.setattr(socket, "send_fds", refuse)
    for ended in [host.exchange(rank) for rank in RANKS]:
        ended.result(FAILSAFE_SECONDS)
    assert all(one.slot >= 0 for one in host.contexts.values())
