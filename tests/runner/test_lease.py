"""The lease of a host: whatever messages are late or lost, its agent's lease ends before hvdrun's."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable

import pytest

from sirtaki.runner.hosts.lease import RENEWALS, AgentLease, HostLease, lease_clock
from sirtaki.runner.launch.reaper import Reaper

SECONDS = 5.0


class Conversation:
    """An agent and hvdrun, whose messages take up to a lease; a stop; at last the link is cut."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.is_cut = self.is_stopped = False
        self.host = HostLease(SECONDS, self.now)
        self.agent = AgentLease(SECONDS, self.now)
        self.end = self.now + SECONDS  # of the agent's lease
        self.unread: list[int] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._arrivals = {"up": 0.0, "down": 0.0}

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def deliver(self, direction: str, act: Callable[[], None]) -> None:
        """Delivers after a while, in the order of sending, unless the link is cut."""
        late = self.random.choice((0.0, 0.01, 0.5, 0.99 * SECONDS)) * self.random.random()
        arrival = self._arrivals[direction] = max(self._arrivals[direction], self.now + late)
        self.after(arrival - self.now, lambda: None if self.is_cut else act())

    def ask(self) -> None:
        number = self.agent.ask(self.now)
        self.deliver("up", lambda: self.answer(number))
        self.after(SECONDS / RENEWALS, self.ask)

    def answer(self, number: int) -> None:
        if self.is_stopped:  # hvdrun reads it when it goes on
            self.unread.append(number)
        else:
            self.host.grant(self.now)
            self.deliver("down", lambda: self.agent.renew(number))

    def stop(self) -> None:
        self.deliver("down", self.agent.suspend)
        self.is_stopped = True
        self.after(self.random.random() * 3 * SECONDS, self.resume)

    def resume(self) -> None:
        self.is_stopped = False
        self.host.resume(self.now)
        self.deliver("down", lambda: self.agent.resume(self.now))
        while self.unread:
            self.answer(self.unread.pop(0))

    def cut(self) -> None:
        self.is_cut = True

    def play(self) -> None:
        self.ask()
        if self.random.random() < 0.7:
            self.after(self.random.random() * 10.0, self.stop)
        self.after(self.random.random() * 40.0, self.cut)
        while self._events and self.now < 200.0:
            self.now, _, act = heapq.heappop(self._events)
            if self.agent.is_over(self.now):
                return
            act()
            self.end = self.now + self.agent.seconds_left(self.now)


@pytest.mark.parametrize("block", range(10))
def test_the_agent_has_ended_its_ranks_when_hvdrun_goes_on_without_them(block: int) -> None:
    for seed in range(200 * block, 200 * (block + 1)):
        talk = Conversation(seed)
        talk.play()
        ranks_are_stopped = talk.end == math.inf
        assert ranks_are_stopped or talk.is_stopped or talk.end <= talk.host.end, f"seed {seed}"


def test_an_answer_to_no_question_has_no_effect() -> None:
    agent = AgentLease(SECONDS, 0.0)
    first = agent.ask(1.0)
    agent.ask(2.0)
    agent.renew(first)
    agent.renew(first)
    agent.renew(77)
    assert agent.seconds_left(2.0) == 4.0


def test_an_answer_to_a_question_from_before_the_lease_has_no_effect() -> None:
    """Covers an agent that has waited for its job: hvdrun's own count begins with each answer."""
    agent = AgentLease(0.0, 0.0)
    early = agent.ask(1.0)
    agent.begin(SECONDS, 2.0)
    asked = agent.ask(3.0)
    agent.renew(early)
    assert agent.seconds_left(3.0) == 4.0
    agent.renew(asked)
    assert agent.seconds_left(3.0) == 5.0


def test_a_lease_of_no_length_never_ends() -> None:
    agent, host = AgentLease(0.0, 5.0), HostLease(0.0, 5.0)
    assert not agent.is_over(1e12)
    assert not host.is_over(1e12)
    assert agent.ask(6.0) == 1
    host.grant(6.0)
    agent.renew(1)
    assert not agent.is_over(1e12)


def test_an_answer_renews_from_its_question() -> None:
    agent = AgentLease(SECONDS, 0.0)
    first, second = agent.ask(1.0), agent.ask(2.0)
    agent.renew(first)
    assert agent.seconds_left(2.0) == 4.0
    agent.renew(second)
    assert agent.seconds_left(2.0) == 5.0
    assert agent.is_over(7.0)


def test_a_reaper_that_ends_the_ranks_hears_of_no_lease() -> None:
    """The agent goes on until its reaper has ended, and may renew its lease meanwhile."""
    with Reaper() as reaper:
        reaper.kill_at(lease_clock() + 100.0)
        reaper.release()
        reaper.kill_at(lease_clock() + 200.0)
