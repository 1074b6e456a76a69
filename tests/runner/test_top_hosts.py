"""`sirtaki top` on hvdrun's host shows the ranks of the other hosts, too; their states on hvdrun's clock."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import TRAINING, Hosts, Start, read_pids, script_writer, wait_until
from rank_samples import state_values

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, WireError
from sirtaki.bindings.observing.watch_marks import FOLDER, FOR_NOW, watch_for_now
from sirtaki.runner.observe.remote_states import RemoteStates, answers
from sirtaki.runner.observe.states import ProcessState, read_job, read_states

Top = Callable[..., subprocess.CompletedProcess[str]]
HOUR = 3600.0


def test_a_rank_on_another_host_is_named_and_shown(
    start_hvdrun: Start, sirtaki: Top, hosts: Hosts, tmp_path: Path
) -> None:
    hosts(hostB={})
    top = functools.partial(sirtaki, "top")
    script = script_writer(tmp_path / "training.py", TRAINING)("")
    job = start_hvdrun("-np", "3", "-H", "localhost:2,hostB:1", "python", script, str(tmp_path))
    read_pids(tmp_path, 3)
    found: list[str] = []

    def is_named() -> bool:
        lines = top(job.pid, "--once").stdout.splitlines()
        found[:] = [line for line in lines if line.lstrip()[:1].isdecimal()]
        return len(found) == 3 and "for rank 2 to submit 'loss'" in found[0] and "others wait" in found[2]

    wait_until(is_named, "rank 2 is named")
    (tmp_path / "go").touch()
    samples: list[Any] = []

    def all_count() -> bool:
        looks = [json.loads(line) for line in top(job.pid, "--json", "--once").stdout.splitlines()]
        samples[:] = [look["ranks"] for look in looks]
        counts = [[rank["operations"] for rank in ranks] for ranks in samples]
        return len(counts) == 2 and len(counts[1]) == 3 and all(map(int.__lt__, *counts))

    wait_until(all_count, "all ranks count more operations")
    assert samples[1][2]["pid"] == int((tmp_path / "2.pid").read_text())
    assert samples[1][2]["memory_bytes"] > 1 << 20
    (tmp_path / "end").touch()
    assert job.wait() == 0


class Agent:
    """The other host: its clock is `ahead` of this one's, and an answer takes `delay` to be taken."""

    def __init__(self, folder: Path, ahead: float) -> None:
        self.sent: list[Frame] = []
        self.states = RemoteStates("hostB", folder, self.sent.append)
        self.ahead = ahead

    def answer(self, number: int, is_running: bool = True) -> None:
        """Answers with a state of rank 2, written half a second ago."""
        now = time.time() + self.ahead
        values = state_values(2, 77, time=now - 0.5)
        process = ProcessState(1.5, 99, begin=now - 60)._asdict()
        answer = {"number": number, "now": now, "values": values, "process": process if is_running else None}
        self.states.take(Frame.of(MessageKind.STATE, answer))


@pytest.mark.parametrize("ahead", [0.0, HOUR, -HOUR])
def test_times_are_those_of_this_clock_and_not_later(tmp_path: Path, ahead: float) -> None:
    watch_for_now(tmp_path)
    agent = Agent(tmp_path, ahead)
    before = time.time()
    agent.states.poll(time.monotonic())
    (question,) = agent.sent
    assert (question.kind, question.number) == (MessageKind.WATCH, 1)
    time.sleep(0.05)  # the way there and back
    written = time.time() - 0.5
    agent.answer(1)
    (state,) = read_job(tmp_path)
    assert (state.values["rank"], state.is_up, state.process_state().memory_bytes) == (2, True, 99)
    begin = state.values["time"]
    assert before - 0.55 <= begin <= written, "it was read at this moment or later"
    assert written <= begin + state.values["look_seconds"]
    assert before - 61 < state.process_state().begin < time.time() - 59
    assert read_states(tmp_path) == [], "metrics have the ranks of their own host"


def test_a_rank_that_has_ended_is_not_up_and_its_successor_counts(tmp_path: Path) -> None:
    watch_for_now(tmp_path)
    agent = Agent(tmp_path, 0.0)
    agent.states.poll(time.monotonic())
    agent.answer(1, is_running=False)
    (state,) = read_job(tmp_path)
    assert not state.is_up
    other = RemoteStates("hostC", tmp_path, agent.sent.append)
    agent.states = other
    other.poll(time.monotonic())
    agent.answer(1)
    (state,) = read_job(tmp_path)
    assert state.is_up


def test_ranks_of_a_host_that_has_ended_are_not_up(tmp_path: Path) -> None:
    watch_for_now(tmp_path)
    agent = Agent(tmp_path, 0.0)
    agent.states.poll(time.monotonic())
    agent.answer(1)
    agent.states.end()
    (state,) = read_job(tmp_path)
    assert (state.values["rank"], state.is_up) == (2, False)


def test_nobody_is_asked_unless_somebody_watches_and_once_a_second(tmp_path: Path) -> None:
    agent = Agent(tmp_path, 0.0)
    now = time.monotonic()
    agent.states.poll(now)
    watch_for_now(tmp_path)
    agent.states.poll(now + 0.5)
    assert agent.sent == []
    agent.states.poll(now + 1.5)
    agent.states.poll(now + 2.0)
    assert len(agent.sent) == 1


def test_an_old_answer_is_dropped_and_a_malformed_one_refused(tmp_path: Path) -> None:
    watch_for_now(tmp_path)
    agent = Agent(tmp_path, 0.0)
    agent.states.poll(time.monotonic())
    agent.answer(0)
    assert read_job(tmp_path) == []
    endless = {
        "number": 1,
        "now": 1.0,
        "values": state_values(2, 77) | {"pid": float("inf")},
        "process": None,
    }
    for answer in ({"number": 1}, endless, {"number": 1, "now": "x", "values": {"pid": 1}, "process": None}):
        with pytest.raises(WireError, match="STATE is malformed"):
            agent.states.take(Frame.of(MessageKind.STATE, answer))


def test_an_agent_has_its_ranks_write_and_sends_what_they_wrote(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    assert list(answers(folder, 7)) == []
    assert (folder / FOR_NOW).exists()
    (folder / "1.json").write_text(json.dumps(state_values(3, os.getpid())))
    (frame,) = answers(folder, 8)
    assert (frame.kind, frame.values["number"], frame.values["values"]["rank"]) == (MessageKind.STATE, 8, 3)
    assert frame.values["process"]["is_stopped"] is False
