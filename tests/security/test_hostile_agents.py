"""A host whose agent sends what it likes: hvdrun refuses it, and keeps its memory."""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_samples import NOW, SINCE, sample, state_values, stepped

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, Sender, WireError
from sirtaki.bindings.observing.watch_marks import REMOTE, watch_for_now
from sirtaki.runner.dashboard.feed import Feed
from sirtaki.runner.hosts import remote
from sirtaki.runner.hosts.channel import Channel
from sirtaki.runner.hosts.lease import HostLease
from sirtaki.runner.hosts.remote import RelayedHosts, RemoteHost, RemoteJob, RemoteRank
from sirtaki.runner.hosts.ssh import SshOptions
from sirtaki.runner.observe import remote_states, timeline
from sirtaki.runner.observe.states import ProcessState, read_job
from sirtaki.runner.observe.timeline import JobTimeline, TimelinePart
from sirtaki.runner.supervise.display import Display
from sirtaki.runner.supervise.post_mortem import PostMortem
from sirtaki.runner.top.snapshot import Snapshot, from_line
from sirtaki.runner.top.table import head_of

OTHER_END = b"\x1b]0;title\x07\x1b[2J"  # what a terminal would obey
MISSING = "no value"


class World:
    """hvdrun's side of an agent on hostB with rank 0; the test is the agent."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.PollSelector()
        self.display = Display(self.selector)
        self.display.expect(1)
        self.host = RemoteHost("hostB", SshOptions(), self.selector, self.display)
        self.rank = RemoteRank(0, self.host)
        states = folder / "states"
        watch_for_now(states)
        self.timeline = JobTimeline(folder / "timeline.json")
        self.host._job = RemoteJob(
            {0: self.rank},
            PostMortem(1, folder),
            lambda *_: None,
            lambda: None,
            timeline=self.timeline,
            lease=HostLease(30.0, time.monotonic()),
            states=states,
        )
        self.agent_reads, writing = os.pipe()
        reading, self.agent_writes = os.pipe()
        self.host._channel = Channel(reading, writing, self.selector, self.host._receive, Sender.AGENT)
        self.host._states = remote_states.RemoteStates("hostB", states, self.host.send)
        self.host._states.poll(time.monotonic() + 60)  # asks for question 1

    def take(self, *frames: Frame) -> None:
        for frame in frames:
            self.host._receive(frame)

    def shown(self, capfd: pytest.CaptureFixture[str]) -> str:
        while not self.display.all_shown:
            for key, _ in self.selector.select():
                if key.fd in (1, 2):
                    key.data()
        return capfd.readouterr().err

    def close(self) -> None:
        self.host._channel.close()
        os.close(self.agent_reads)
        os.close(self.agent_writes)
        self.selector.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def state(own_pid: int, number: int = 1, **changes: Any) -> Frame:
    values = {**state_values(0, own_pid), **changes}
    for name in [name for name, value in values.items() if value is MISSING]:
        del values[name]
    process = ProcessState(1.0, 1, begin=NOW)._asdict()
    return Frame.of(MessageKind.STATE, {"number": number, "now": NOW, "values": values, "process": process})


def test_states_that_nobody_has_asked_for_are_not_kept(tmp_path: Path) -> None:
    states = remote_states.RemoteStates("hostB", tmp_path, lambda _: None)
    states.take(state(7, number=0))
    assert not (tmp_path / REMOTE).exists()


def test_states_of_endless_processes_do_not_fill_the_disk(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_states, "_MOST_FILES", 10)
    for pid in range(1, 100):
        world.take(state(pid))
    kept = {file.name for file in (tmp_path / "states" / REMOTE).iterdir()}
    assert kept == {f"hostB-{pid}.json" for pid in range(90, 100)}
    monkeypatch.setattr(remote_states, "_MOST_BYTES", 1)
    world.take(state(100))
    assert list((tmp_path / "states" / REMOTE).iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": "0"},
        {"rank": MISSING},
        {"pid": -1},
        {"pid": "../../x"},
        {"size": 1 << 70},
        {"time": float("nan")},
        {"stack": "text"},
        {"activity": {}},
        {"steps": None},
        {"pid": 1 << 31},
        {"tensors": [["loss", 1]]},
        {"tensors": [["loss", 0, None, 0.0, 0.0]]},
        {"tensors": [["loss", 1 << 31, None, 0.0, 0.0]]},
        {"steps": {**stepped(2, 0.05), "times": {"bounds": [], "counts": [], "total_seconds": 0.0}}},
        {"recording": {"file": "/tmp/x"}},
        {"sent": [{"peer_host": 3}]},
        {"is_member": 1},
    ],
    ids=str,
)
def test_a_malformed_state_is_refused_and_ends_no_reader(
    world: World, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(WireError, match=f"STATE is malformed: .*{next(iter(changes))}"):
        world.take(state(7, **changes))
    world.take(state(8))
    values = json.loads(state(7, **changes).payload)["values"]
    (tmp_path / "states" / REMOTE / "hostB-7.json").write_text(json.dumps({**values, "process": None}))
    (tmp_path / "states" / "7.json").write_text(json.dumps(values))
    (tmp_path / "states" / "9.json").write_text("[" * 100_000)
    assert [found.values["pid"] for found in read_job(tmp_path / "states")] == [8]


def test_texts_of_a_state_command_no_terminal(world: World, tmp_path: Path) -> None:
    evil = f"hostB{OTHER_END.decode()}\nhvdrun: all is well"
    world.take(state(7, host=evil, line=evil, last_change=evil, stack=[evil]))
    (found,) = read_job(tmp_path / "states")
    clean = "hostB?]0;title??[2J hvdrun: all is well"
    assert [found.values[name] for name in ("host", "line", "last_change")] == [clean] * 3
    recorded = Snapshot(NOW, SINCE, evil, (sample(0, host=evil, generation=2, last_change=evil),))
    assert all(line.isprintable() for line in head_of(from_line(recorded.as_line())))


def test_a_refusal_is_one_line_and_comes_once(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    refusal = Frame(MessageKind.REFUSED, 0, OTHER_END + b"done\nhvdrun: all ranks have finished")
    world.take(refusal)
    with pytest.raises(WireError, match="REFUSED is not expected now"):
        world.take(refusal)
    assert world.shown(capfd) == "hvdrun: hostB: ?]0;title??[2Jdone hvdrun: all ranks have finished\n"


def test_a_rank_starts_once(world: World) -> None:
    started = Frame(MessageKind.STARTED, 0, number=7)
    world.take(started)
    for frame in (started, Frame(MessageKind.REFUSED, 0, b"x")):
        with pytest.raises(WireError, match="is not expected now"):
            world.take(frame)


def test_an_answer_is_one_line(world: World) -> None:
    world.take(Frame.of(MessageKind.ANSWER, {"version": "1\n2", "problem": "x\nhvdrun: y"}))
    assert "\n" not in world.host.failure


def test_an_agent_that_does_not_read_gets_no_leases(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_MOST_UNREAD", 1000)
    for number in range(20_000):  # a pipe holds 64 KiB
        world.take(Frame(MessageKind.ALIVE, 0, number=number))
    assert 0 < world.host._channel.backlog < 2000


def test_a_timeline_leaves_room_on_the_disk(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.take(Frame(MessageKind.WORKER_TIMELINE, 0, b"[]", 1))
    monkeypatch.setattr(timeline, "_LEFT_FREE", 1 << 60)
    world.take(Frame(MessageKind.WORKER_TIMELINE, 0, b"more", 1))
    assert TimelinePart(0, 1).file(world.timeline.path).read_bytes() == b"[]"
    monkeypatch.setattr(remote, "_MOST_PARTS", 1)
    with pytest.raises(WireError, match="more than 1 parts"):
        world.take(Frame(MessageKind.WORKER_TIMELINE, 0, b"[]", 2))


@pytest.mark.parametrize("kind", [MessageKind.PASSED, MessageKind.PASSED_ERROR])
def test_what_comes_over_another_host_waits_in_its_pipe(kind: MessageKind) -> None:
    ends = [os.pipe() for _ in range(3)]
    with selectors.PollSelector() as selector:
        hosts = RelayedHosts(selector, lambda _: None)
        process = hosts.start(["ssh"], (ends[0][0], ends[1][1], ends[2][1]))
        taken = 0
        while hosts.balance(0) and taken < 16 << 20:
            hosts.take(Frame(kind, 0, bytes(64 << 10)))
            taken += 64 << 10
        assert process.backlog + process._errors.backlog < 2 << 20
        assert (taken < 2 << 20) == (kind == MessageKind.PASSED), "an error's reader may wait for a terminal"
        os.write(ends[0][1], b"x")
        assert not hosts.balance(2 << 20) or kind == MessageKind.PASSED_ERROR
        assert ends[0][0] not in selector.get_map(), "input waits while the agent does not read"
        process.clear()
    for end in (end for pair in ends for end in pair):
        os.close(end)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TRUE_STATE = json.loads(state(7).payload)
true_or_not = st.fixed_dictionaries(
    {"number": st.just(1)},
    optional={
        "now": st.just(NOW) | json_values,
        "values": st.tuples(st.sampled_from([*TRUE_STATE["values"]]), json_values).map(
            lambda changed: {**TRUE_STATE["values"], changed[0]: changed[1]}
        ),
        "process": st.just(TRUE_STATE["process"]) | json_values,
    },
)
payloads = st.one_of(
    st.binary(max_size=40),
    json_values.map(lambda value: json.dumps(value).encode()),
    true_or_not.map(lambda value: json.dumps(value).encode()),
    st.integers(0, (1 << 32) - 1).map(lambda number: number.to_bytes(4, "big")),
)


@given(st.lists(st.builds(Frame, st.sampled_from(MessageKind), st.integers(-3, 2), payloads), max_size=8))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_frames_are_taken_or_refused(tmp_path: Path, frames: list[Frame]) -> None:
    world = World(tmp_path)
    try:
        for frame in frames:
            world.take(frame)
    except WireError:
        pass
    finally:
        read_job(tmp_path / "states")
        world.close()


def test_a_look_that_fails_does_not_end_the_feed_of_the_page(capfd: pytest.CaptureFixture[str]) -> None:
    looks = iter([ZeroDivisionError("of a state"), None])

    def source() -> Iterator[Snapshot]:
        if error := next(looks, None):
            raise error
        yield Snapshot(NOW, SINCE, "a job", (sample(0),))

    feed = Feed(source, NOW, lambda: None)
    events = feed.events()
    found = ""
    while '"a job"' not in found:  # a comment follows each 5 s
        found = next(events)
    feed.end()
    assert "ZeroDivisionError: of a state" in capfd.readouterr().err
