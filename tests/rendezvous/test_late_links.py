"""The threads that make links while a rank runs, with real connections and a stand-in for the core."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from launching import FAILSAFE_SECONDS, wait_until
from open_files import open_files, opened_since

from sirtaki.bindings.bootstrap import world_builder
from sirtaki.bindings.bootstrap.connection.connect import connect
from sirtaki.bindings.bootstrap.job import Identity, Job, RendezvousError
from sirtaki.bindings.bootstrap.peer_listener import Handshakes, PeerListener
from sirtaki.bindings.bootstrap.world_builder import LateLinks, Neighbourhood, PeerEndpoint, choose
from sirtaki.bindings.context import Context

JOB = Job("job", 4, b"k" * 32, "1.0")


@dataclass
class Core:
    """A context that notes its links, and asks for some."""

    rank: int
    requests: queue.Queue[list[int] | None] = field(default_factory=queue.Queue)
    links: queue.Queue[tuple[int, socket.socket]] = field(default_factory=queue.Queue)
    failures: queue.Queue[tuple[int, str]] = field(default_factory=queue.Queue)
    failure: str | None = None
    is_shut_down: bool = False
    end_callbacks: list[Callable[[], None]] = field(default_factory=list)

    def link_socket(self, rank: int, descriptor: int) -> None:
        self.links.put((rank, socket.socket(fileno=descriptor)))

    def take_link(self, rank: int) -> socket.socket:
        peer, connection = self.links.get(timeout=FAILSAFE_SECONDS)
        assert peer == rank
        connection.settimeout(FAILSAFE_SECONDS)
        return connection


class Requests:
    """The requests of a `Core`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def collect(self) -> list[int] | None:
        return self._core.requests.get()

    def fail(self, rank: int, text: str) -> None:
        self._core.failures.put((rank, text))


def handshakes_of(rank: int, generation: int = 1) -> Handshakes:
    return Handshakes(JOB, Identity(rank, generation), time.monotonic() + FAILSAFE_SECONDS)


class World:
    """Ranks in one process, each with its listener on TCP; rank 0 has a link to each other from the start."""

    def __init__(self, ranks: int, channels: int = 1, seconds: float = FAILSAFE_SECONDS) -> None:
        self.cores = [Core(rank) for rank in range(ranks)]
        listeners = [PeerListener() for _ in range(ranks)]
        self.addresses = [one.listen_to_hosts([], JOB) for one in listeners]
        endpoints = {
            rank: PeerEndpoint(f"rank {rank} (pid {rank})", addresses, channels)
            for rank, addresses in enumerate(self.addresses)
        }
        self.late = []
        for rank, listener in enumerate(listeners):
            linked = frozenset(range(1, ranks) if rank == 0 else [0])
            others = {other: endpoint for other, endpoint in endpoints.items() if other != rank}
            around = Neighbourhood(others, linked, seconds)
            one = LateLinks(cast(Context, self.cores[rank]), around, handshakes_of(rank))
            one.start(listener)
            self.late.append(one)

    def request(self, low: int, high: int) -> None:
        """Asks both ranks for a link between them."""
        self.cores[low].requests.put([high])
        self.cores[high].requests.put([low])

    def close(self) -> None:
        for core in self.cores:
            core.requests.put(None)
        for one in self.late:
            one.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr(world_builder, "LinkRequests", Requests)
    with contextlib.ExitStack() as cleanup:

        def make(*arguments: Any, **options: Any) -> World:
            return cleanup.enter_context(contextlib.closing(World(*arguments, **options)))

        yield make


def come_to(ranks: World, mine: Handshakes) -> socket.socket:
    """Connects to rank 1 as another rank."""
    found, _ = connect(ranks.addresses[1], lambda to: mine.begin_handshake(to, 1), mine.deadline)
    choose(found)
    assert isinstance(found, socket.socket)
    return found


def exchange(one: socket.socket, other: socket.socket, text: bytes) -> None:
    with one, other:
        one.sendall(text)
        assert other.recv(100) == text


def test_the_higher_rank_connects_and_both_cores_get_the_link(world: Callable[..., World]) -> None:
    ranks = world(4)
    for low, high in ((1, 3), (2, 3), (1, 2)):
        ranks.request(low, high)
        exchange(ranks.cores[low].take_link(high), ranks.cores[high].take_link(low), b"link")


def test_a_link_of_several_connections_is_handed_over_whole_and_in_order(world: Callable[..., World]) -> None:
    ranks = world(3, channels=3)
    ranks.request(1, 2)
    for channel in range(3):
        name = f"channel {channel}".encode()
        exchange(ranks.cores[1].take_link(2), ranks.cores[2].take_link(1), name)


def test_strangers_and_repeated_connections_disturb_no_link(
    world: Callable[..., World], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = world(3)

    def come(mine: Handshakes) -> socket.socket:
        found = come_to(ranks, mine)
        found.settimeout(FAILSAFE_SECONDS)
        return found

    strange = handshakes_of(2)
    with pytest.raises(RendezvousError):
        come(replace(strange, job=replace(JOB, key=b"x" * 32))).close()
    with pytest.raises(RendezvousError, match="init number"):
        come(handshakes_of(2, generation=2))
    assert ranks.cores[1].links.empty()
    ranks.request(1, 2)
    link = ranks.cores[1].take_link(2), ranks.cores[2].take_link(1)
    for again in (2, 0):  # has a late link; has one since the start, and is no rank that connects
        with come(handshakes_of(again)) as repeated:
            assert repeated.recv(1) == b""
    assert ranks.cores[1].links.empty()
    exchange(*link, b"still there")
    assert "does not know the key" in capsys.readouterr().err


def test_a_rank_that_has_given_up_may_come_again(world: Callable[..., World]) -> None:
    """It has closed a connection that the other rank takes for complete."""
    ranks = world(3, channels=2)
    mine = handshakes_of(2)
    first = come_to(ranks, mine)
    wait_until(lambda: ranks.late[1]._arrived, "the first of two connections")
    first.close()
    ranks.request(1, 2)
    for channel in range(2):
        name = f"channel {channel}".encode()
        exchange(ranks.cores[1].take_link(2), ranks.cores[2].take_link(1), name)


def test_a_rank_that_cannot_be_reached_is_reported_to_the_core(world: Callable[..., World]) -> None:
    ranks = world(3, seconds=0.5)
    ranks.cores[1].requests.put(None)
    ranks.late[1].close()
    ranks.cores[2].requests.put([1])
    rank, text = ranks.cores[2].failures.get(timeout=FAILSAFE_SECONDS)
    assert rank == 1
    assert "rank 1 (pid 1) cannot be reached" in text


def test_a_rank_whose_world_has_failed_stops_trying(world: Callable[..., World], monkeypatch: Any) -> None:
    monkeypatch.setattr(world_builder, "_ATTEMPT_SECONDS", 0.2)
    ranks = world(3)
    ranks.cores[1].requests.put(None)
    ranks.late[1].close()
    ranks.cores[2].failure = "rank 1 was lost"
    ranks.cores[2].requests.put([1])
    assert ranks.cores[2].failures.get(timeout=FAILSAFE_SECONDS)[0] == 1


def test_threads_and_sockets_end_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_builder, "LinkRequests", Requests)
    before, threads = open_files(), threading.active_count()
    ranks = World(3, channels=2)
    mine = handshakes_of(2)
    first = come_to(ranks, mine)
    wait_until(lambda: ranks.late[1]._arrived, "the first of two connections")
    ranks.close()
    first.close()
    wait_until(lambda: threading.active_count() == threads, "the ends of the threads")
    assert opened_since(before) == {}


def test_a_child_keeps_no_listener(world: Callable[..., World]) -> None:
    ranks = world(2)
    child = os.fork()
    if not child:
        listening = [one for one in ranks.late if one._listener._selector.get_map()]  # type: ignore[union-attr]
        os._exit(len(listening))
    assert os.waitpid(child, 0)[1] == 0
    late = ranks.late[1]
    assert late._listener is not None
    assert late._listener._selector.get_map()
