"""The order in which a job's hosts are reached: how many at a time, and over which other host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from sirtaki.runner.hosts import host_connection
from sirtaki.runner.hosts.host_connection import ANSWER_SECONDS, HostAttempts
from sirtaki.runner.hosts.remote import RemoteHost


@dataclass(eq=False)
class Host:
    """A host in the place of a `RemoteHost`, which answers when a test says so."""

    name: str
    over: Host | None
    answer: Mapping[str, Any] | None = None
    failure: str = ""
    is_closed: bool = False
    behind: list[Host] = field(default_factory=list)
    breaks: bool = False

    def poll(self) -> None:
        """Notes that its connection has broken, and that those of the hosts behind it have."""
        if self.breaks:
            for one in (self, *self.behind):
                one.failure = f"{self.name} was lost"

    def give_up_waiting(self, seconds: float) -> None:
        self.failure = f"{self.name} has not answered in {seconds:g} s"

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Network:
    """All attempts so far, and those that go on."""

    begun: list[Host] = field(default_factory=list)
    now: float = 1000.0

    def begin(self, name: str, over: RemoteHost | None) -> RemoteHost:
        self.begun.append(Host(name, cast("Host | None", over)))
        if over is not None:
            cast(Host, over).behind.append(self.begun[-1])
        return cast(RemoteHost, self.begun[-1])

    def reach(self, count: int, relays: bool) -> HostAttempts:
        return HostAttempts([f"h{index}" for index in range(count)], self.begin, relays)

    def waiting(self) -> list[Host]:
        return [one for one in self.begun if one.answer is None and not one.failure]

    def answer(self, *names: str) -> None:
        for host in self.waiting():
            if host.name in names or not names:
                host.answer = {}

    def ways(self) -> list[tuple[str, str]]:
        """Returns over which host each attempt was made; "" for this one."""
        return [(one.name, one.over.name if one.over else "") for one in self.begun]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.setattr(host_connection, "AT_A_TIME", 3)
    return Network()


def test_so_many_hosts_at_a_time_are_reached_from_here(network: Network) -> None:
    attempts = network.reach(8, relays=False)
    assert attempts.advance(network.now) == []
    assert [one.name for one in network.begun] == ["h0", "h1", "h2"]
    network.answer("h1")
    assert attempts.advance(network.now) == [1]
    assert [one.name for one in network.waiting()] == ["h0", "h2", "h3"]
    settled = []
    while attempts.due is not None:
        assert len(network.waiting()) <= 3
        network.answer()
        settled += attempts.advance(network.now)
    assert sorted(settled) == [0, 2, 3, 4, 5, 6, 7]
    assert [one.name for one in attempts.remotes()] == [f"h{index}" for index in range(8)]
    assert {over for _, over in network.ways()} == {""}


def test_hosts_beyond_the_limit_are_reached_over_the_first_ones(network: Network) -> None:
    attempts = network.reach(8, relays=True)
    attempts.advance(network.now)
    network.answer("h0", "h1", "h2")
    assert attempts.advance(network.now) == [0, 1, 2]
    network.answer()
    assert sorted(attempts.advance(network.now)) == [3, 4, 5, 6, 7]
    assert attempts.due is None
    ways = [("h0", ""), ("h1", ""), ("h2", ""), ("h3", "h0"), ("h6", "h0"), ("h4", "h1"), ("h7", "h1")]
    assert network.ways() == [*ways, ("h5", "h2")]


def test_as_many_hosts_as_the_limit_need_no_others(network: Network) -> None:
    attempts = network.reach(3, relays=True)
    attempts.advance(network.now)
    network.answer()
    assert attempts.advance(network.now) == [0, 1, 2]
    assert {over for _, over in network.ways()} == {""}


def test_a_host_that_another_one_does_not_reach_is_reached_from_here(network: Network) -> None:
    attempts = network.reach(4, relays=True)
    attempts.advance(network.now)
    network.answer()
    attempts.advance(network.now)
    first = network.begun[3]
    first.failure = "h0 does not let you in without a password"
    assert attempts.advance(network.now) == []
    assert first.is_closed
    assert attempts.failed_relays == [first.failure]
    network.answer()
    assert attempts.advance(network.now) == [3]
    assert network.ways()[3:] == [("h3", "h0"), ("h3", "")]
    assert cast(Host, attempts.remotes()[3]).failure == ""


def test_the_loss_of_a_host_that_others_are_reached_over_is_noticed_at_once(network: Network) -> None:
    attempts = network.reach(4, relays=True)
    attempts.advance(network.now)
    network.answer()
    attempts.advance(network.now)
    network.begun[0].breaks = True
    attempts.advance(network.now)
    assert attempts.failed_relays == ["h0 was lost"]
    assert network.ways()[3:] == [("h3", "h0"), ("h3", "")]


def test_an_answer_counts_after_a_pause_of_hvdrun(network: Network) -> None:
    attempts = network.reach(1, relays=False)
    attempts.advance(network.now)
    network.answer()
    assert attempts.advance(network.now + 2 * ANSWER_SECONDS) == [0]
    assert network.begun[0].failure == ""


def test_a_host_that_lacks_something_is_not_tried_again(network: Network) -> None:
    attempts = network.reach(4, relays=True)
    attempts.advance(network.now)
    network.answer()
    attempts.advance(network.now)
    network.begun[3].answer, network.begun[3].failure = {}, "h3 has another version of sirtaki"
    assert attempts.advance(network.now) == [3]
    assert attempts.due is None
    assert len(network.begun) == 4


def test_hosts_behind_one_that_fails_are_reached_from_here(network: Network) -> None:
    attempts = network.reach(7, relays=True)
    attempts.advance(network.now)
    network.begun[0].failure = "there is no host called h0"
    assert attempts.advance(network.now) == [0]
    assert [one.name for one in network.waiting()] == ["h1", "h2", "h3"]
    network.answer()
    attempts.advance(network.now)
    network.answer()
    attempts.advance(network.now)
    assert attempts.due is None
    ways = dict(network.ways())
    assert (ways["h3"], ways["h6"], ways["h4"], ways["h5"]) == ("", "", "h1", "h2")


def test_each_host_has_its_own_time_to_answer(network: Network) -> None:
    attempts = network.reach(4, relays=False)
    attempts.advance(network.now)
    network.answer("h0")
    attempts.advance(network.now + 5)
    assert attempts.due == network.now + ANSWER_SECONDS
    assert attempts.advance(network.now + ANSWER_SECONDS) == [1, 2]
    assert attempts.due == network.now + 5 + ANSWER_SECONDS
    assert [bool(cast(Host, one).failure) for one in attempts.remotes()] == [False, True, True, False]
