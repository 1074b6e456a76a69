"""The hosts of an elastic job, with connections that a test answers: orders go to agents that take them."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.runner.elastic.arbiter.model import Slot
from sirtaki.runner.elastic.other_hosts import OtherHosts
from sirtaki.runner.hosts.channel import START_MARK
from sirtaki.runner.hosts.lease import HostLease, lease_clock
from sirtaki.runner.hosts.remote import RemoteHost, RemoteJob, RemoteRank
from sirtaki.runner.hosts.ssh import SshOptions
from sirtaki.runner.launch.reaper import Reaper
from sirtaki.runner.supervise.display import Display
from sirtaki.runner.supervise.failure_analysis import ExitStatus

SLOT = Slot("hostB", 0)
COOLDOWN = (1.0, 60.0)


class Agent:
    """A connection to an agent: records what it is told, and is what a test makes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answer: dict[str, int] | None = {"gpus": 0}
        self.failure = ""
        self.accepted = True
        self.leaves = False
        self.ended = False
        self.deadline: float | None = None
        self.told: list[str] = []

    def poll(self) -> None:
        """Has nothing to do."""

    def finish(self) -> None:
        self.told.append("finish")

    def give_up(self, reason: str) -> None:
        self.told.append(reason)

    def close(self) -> None:
        self.told.append("close")


class Hosts:
    """The hosts, and all agents so far."""

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.lines: list[str] = []
        self.hosts = OtherHosts(self._begin, lambda *_: None, self.lines.append, COOLDOWN)  # type: ignore[arg-type]

    def _begin(self, name: str) -> Agent:
        self.agents.append(Agent(name))
        return self.agents[-1]

    def poll(self, now: float, *used: Slot) -> bool:
        return self.hosts.poll(now, dict(enumerate(used)))

    def takes_workers(self) -> bool:
        assert (self.hosts.ready(SLOT.host) is not None) == self.hosts.takes_workers(SLOT)
        return self.hosts.takes_workers(SLOT)


def test_a_host_that_is_named_again_while_its_agent_ends_gets_another_one() -> None:
    """Removes a host, and names it again before its agent, which was told to end, has done so."""
    job = Hosts()
    job.hosts.want([SLOT])
    job.poll(0.0)
    assert job.poll(0.1)
    assert job.takes_workers()
    job.hosts.want([])
    job.poll(0.2, SLOT)
    assert job.agents[0].told == []  # a worker still runs there
    job.poll(0.3)
    assert job.agents[0].told == ["finish"]
    job.hosts.want([SLOT])
    job.poll(0.4)
    assert not job.takes_workers()
    assert job.hosts.usable([SLOT], {}) == []
    job.agents[0].ended = True
    job.poll(0.5)
    assert job.hosts.due == 0.5  # at once: nothing has failed
    job.poll(0.6)
    assert job.poll(0.7)
    assert len(job.agents) == 2
    assert job.takes_workers()
    assert job.lines == []


def test_an_agent_that_was_asked_to_end_is_replaced_after_the_longest_pause() -> None:
    job = Hosts()
    job.hosts.want([SLOT])
    job.poll(0.0)
    job.poll(0.1)
    job.agents[0].leaves = True
    assert job.poll(0.2)
    assert job.agents[0].told == ["finish"]
    job.agents[0].ended = True
    job.poll(0.3)
    assert job.hosts.due == 0.3 + COOLDOWN[1]
    assert job.lines == ["hostB was asked to end: its ranks leave at the next commit"]


@pytest.fixture
def remote() -> Iterator[RemoteHost]:
    """Returns a host whose agent says that it has left nothing behind, whatever was started there."""
    with selectors.PollSelector() as selector, Reaper() as reaper:
        host = RemoteHost("hostB", SshOptions(), selector, Display(selector))
        data = START_MARK + Frame(MessageKind.DONE).pack()
        command = [sys.executable, "-c", f"import sys; sys.stdout.buffer.write({data!r})"]
        host.connect(command, {}, reaper)
        yield host
        host.close()


def test_a_rank_of_which_the_agent_has_reported_no_end_has_ended_with_it(remote: RemoteHost) -> None:
    rank = RemoteRank(0, remote)
    remote.start({}, RemoteJob({0: rank}, None, lambda *_: None, lambda: None))
    os.waitid(os.P_PID, remote._process.pid, os.WEXITED | os.WNOWAIT)
    remote.poll()
    assert remote.ended
    assert remote.done
    status = rank.check()
    assert status is not None
    assert status.lost == "hvdrun's agent there has ended"


@pytest.mark.parametrize(("code", "sent"), [(0, [(MessageKind.SIGNAL, 5, signal.SIGKILL)]), (1, [])])
def test_what_a_rank_has_left_behind_is_killed_there_also_if_it_has_not_failed(
    code: int, sent: list[tuple[MessageKind, int, int]]
) -> None:
    """Covers exit code 0, which may be no failure for the agent; it does the same for others by itself."""
    frames: list[Frame] = []
    host: Any = SimpleNamespace(send=frames.append)
    rank = RemoteRank(5, host)
    rank.note(ExitStatus(5, code, 0, "hostB"))
    rank.clear()
    assert [(frame.kind, frame.rank, frame.number) for frame in frames] == sent


@pytest.mark.parametrize(("seconds", "left"), [(15.0, 15.1), (600.0, 600.1), (0.0, 60.0)])
def test_ranks_may_run_until_their_lease_ends(seconds: float, left: float, remote: RemoteHost) -> None:
    """Covers leases that are longer than an ordinary silence, and one without an end."""
    lease = HostLease(seconds, lease_clock())
    remote.start({}, RemoteJob({}, None, lambda *_: None, lambda: None, lease=lease))
    assert left - 5.0 < remote.lease_left <= left
