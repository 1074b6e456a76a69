"""The server waits for what ranks have sent before they ended, although it may be on its way for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from collected_hosts import JOB, CollectedHosts
from launching import FAILSAFE_SECONDS

from sirtaki.bindings.bootstrap.messages import RankEvent


@pytest.fixture
def hosts() -> Iterator[CollectedHosts]:
    started = CollectedHosts()
    yield started
    started.close()


class Drain:
    """One wait, and the events that the server had reported when it ended."""

    def __init__(
        self, hosts: CollectedHosts, seconds: float = FAILSAFE_SECONDS, lost: Sequence[int] = ()
    ) -> None:
        self._hosts = hosts
        self._ended = threading.Event()
        self.missing: Sequence[int] = ()
        self.events: list[RankEvent] = []
        hosts.server.drain(seconds, self._end, lost)

    def _end(self, missing: Sequence[int]) -> None:
        self.missing, self.events = missing, list(self._hosts.events)
        self._ended.set()

    def wait(self) -> None:
        assert self._ended.wait(FAILSAFE_SECONDS)

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()


class Held:
    """A collector that does nothing until it is released."""

    def __init__(self, hosts: CollectedHosts) -> None:
        self._reached, self._released = threading.Event(), threading.Event()
        hosts.collectors[0]._call_soon(self._hold)
        assert self._reached.wait(FAILSAFE_SECONDS)

    def _hold(self) -> None:
        self._reached.set()
        self._released.wait(FAILSAFE_SECONDS)

    def release(self) -> None:
        self._released.set()


def test_reports_that_a_collector_still_holds_are_awaited(hosts: CollectedHosts) -> None:
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    held = Held(hosts)
    clients[2].report("aborted", "ValueError: bad")
    clients[3].report("finished")
    for client in clients:
        client.close()
    drain = Drain(hosts)
    held.release()
    drain.wait()
    assert list(drain.missing) == []
    assert RankEvent("aborted", 2, 1, "ValueError: bad") in drain.events
    assert RankEvent("finished", 3, 1) in drain.events


def test_ranks_whose_reports_do_not_come_in_time_are_named(hosts: CollectedHosts) -> None:
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    held = Held(hosts)
    for client in clients:
        client.close()
    drain = Drain(hosts, 3.0)  # in which the other collector confirms
    drain.wait()
    assert list(drain.missing) == [2, 3]
    held.release()


def test_nothing_is_awaited_of_a_host_that_is_lost(hosts: CollectedHosts) -> None:
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    held = Held(hosts)
    for client in clients:
        client.close()
    drain = Drain(hosts, lost=[2, 3])
    drain.wait()
    assert list(drain.missing) == []
    held.release()


def test_a_rank_with_a_connection_of_its_own_is_awaited(hosts: CollectedHosts) -> None:
    clients = hosts.all()
    hosts.gather_all(clients, [b""] * JOB.size)
    for client in clients[1:]:
        client.close()
    drain = Drain(hosts)
    clients[0].report("aborted", "ValueError: bad")
    hosts.wait_for("aborted")
    assert not drain.is_over
    clients[0].close()
    drain.wait()
    assert list(drain.missing) == []


def test_nothing_is_awaited_where_nobody_is_connected(hosts: CollectedHosts) -> None:
    assert hosts.works()
    for client in hosts.clients:
        client.close()
    Drain(hosts).wait()
    Drain(hosts).wait()  # all have said so before
