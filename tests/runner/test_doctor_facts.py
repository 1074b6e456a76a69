"""The parts of the doctor below its rules: gatherers, the reading of facts, listeners and sessions."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirtaki.bindings.bootstrap.connection.address import local_addresses
from sirtaki.runner.doctor import gathering, probe, session
from sirtaki.runner.doctor.cli import _pairs
from sirtaki.runner.doctor.decoding import MAX_ADDRESSES, decode, redact, redacted
from sirtaki.runner.doctor.facts import Cores, HostFacts, Limits, Network
from sirtaki.runner.doctor.gathering import MARK, Choice, Topic, Trial, answer_within, gather, gather_cores
from sirtaki.runner.doctor.probe import TOKEN_BYTES, Listener, measure, reach
from sirtaki.runner.doctor.session import DoctorRoute, Session, SessionError
from sirtaki.runner.hosts.ssh import StartFailure

NOTHING = Choice((), Trial.NONE)
NAMES = st.sampled_from([*HostFacts.__dataclass_fields__])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
)


@pytest.fixture(scope="module")
def facts() -> Iterator[HostFacts]:
    """Returns the facts about this host, whose name a name server need not know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_look_up", lambda _: ("192.0.2.7",))
        yield gather(NOTHING)


def test_facts_of_this_host_come_back_as_they_were(facts: HostFacts) -> None:
    assert facts.missed == {}
    assert decode(HostFacts, json.loads(json.dumps(asdict(facts)))) == facts
    assert facts.network is not None
    assert set(facts.network.reachable_at) == set(local_addresses())


def test_a_list_is_bounded() -> None:
    addresses = ["192.0.2.1"] * MAX_ADDRESSES
    assert decode(tuple[str, ...], addresses, MAX_ADDRESSES) == (*addresses,)
    with pytest.raises(ValueError, match="at most 64"):
        decode(tuple[str, ...], [*addresses, "192.0.2.1"], MAX_ADDRESSES)


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        ("limits", {"open_files": "many", "open_files_hard": 1, "locked": 1}),
        ("limits", {"open_files": True, "open_files_hard": 1, "locked": 1}),
        ("limits", {"open_files": 1 << 70, "open_files_hard": 1, "locked": 1}),
        ("limits", {"open_files": 1}),
        ("limits", [1, 2, 3]),
        ("cores", {"total": 1, "affinity": 1, "usable": 1, "quota": float("inf")}),
        ("missed", {str(number): "" for number in range(1000)}),
        ("frameworks", [{"name": "numpy"}]),
    ],
)
def test_malformed_facts_are_rejected(topic: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"has no|is no"):
        decode(HostFacts, {"version": "1", topic: value})


@settings(deadline=None)
@given(JSON)
def test_arbitrary_facts_are_read_or_rejected(value: Any) -> None:
    try:
        found = decode(HostFacts, value)
    except ValueError:
        return
    assert found.version.isprintable()


def test_facts_have_no_control_characters() -> None:
    network = decode(
        Network, {"hostname": "a\x1b[2J\nb\u202e", "resolves_to": [], "interfaces": [], "new": 1}
    )
    assert network.hostname == "a?[2J b?"


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    monkeypatch.setattr(gathering, "_look_up", lambda _: hold.wait())
    monkeypatch.setattr(gathering, "_RESOLVE_SECONDS", 0.05)
    found = gathering.gather_network()
    hold.set()
    assert found.resolves_to == ()
    assert set(found.reachable_at) == set(local_addresses())


def test_a_driver_with_spaces_in_its_version(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA  x86_64  550.1\nGCC\n")
    assert gathering.driver_version(tmp_path) == "NVIDIA x86_64 550.1"
    assert gathering.driver_version(tmp_path / "none") == ""


def test_a_topic_that_fails_or_hangs_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()

    def fail() -> object:
        raise OSError("no /proc")

    topics = {"memory": Topic(fail), "limits": Topic(hold.wait, 0.05)}
    monkeypatch.setattr(gathering, "TOPICS", {**gathering.TOPICS, **topics})
    found = gather(NOTHING)
    hold.set()
    assert (
        found.missed.items() >= {"memory": "OSError: no /proc", "limits": "no answer within 0.05 s"}.items()
    )
    assert (found.memory, found.limits) == (None, None)
    assert found.cores is not None
    assert answer_within(5, lambda: Limits(1, 1, 1)) == (Limits(1, 1, 1), "")


def test_a_framework_is_tried_on_this_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []

    def start(arguments: Sequence[str], *_: object) -> tuple[int, str, str]:
        started.append(arguments)
        return 0, "", ""

    monkeypatch.setattr(gathering, "run_python", start)
    assert gathering.try_framework("numpy").state == "works"
    assert " -np 2 -H localhost:2 " in " ".join(started[-1])  # also where a scheduler has allocated hosts


def test_the_quota_is_the_smallest_of_a_group_and_its_parents(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/pod/container"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    cores = gather_cores(tmp_path, {"OMP_NUM_THREADS": "4,2"})
    assert (cores.quota, cores.threads) == (1.5, 4)
    (group.parent / "cpu.max").unlink()
    assert gather_cores(tmp_path, {}).quota == 0.0
    assert Cores(1, 1, 1).quota == 0.0


def test_secrets_are_removed() -> None:
    key = "0123456789abcdef" * 4
    variables = {"SIRTAKI_KEY": "x", "SIRTAKI_KEY_FILE": "/key", "NCCL_TOKEN": "y", "HOROVOD_X": f"a {key}"}
    variables |= {"NCCL_AUTH": "z", "OMP_PWD": "z"}
    assert redacted(variables) == {
        "SIRTAKI_KEY": "<removed>",
        "SIRTAKI_KEY_FILE": "/key",
        "NCCL_TOKEN": "<removed>",
        "HOROVOD_X": "a <removed>",
        "NCCL_AUTH": "<removed>",
        "OMP_PWD": "<removed>",
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pass@proxy:80/ password=hush", "http://<removed>@proxy:80/ password=<removed>"),
        ("DB_PASSWORD='a b' Token=x", "DB_PASSWORD=<removed> Token=<removed>"),
        ("run --db-password hush --fast", "run --db-password <removed> --fast"),
        ("API_KEY=x api-key=y", "API_KEY=<removed> api-key=<removed>"),
        ("authorization: basic x, Bearer y", "authorization: basic <removed> Bearer <removed>"),
        ("""{'token': 'x', "secret": "y"}""", """{'token': <removed>, "secret": <removed>}"""),
        ("an unexpected token: x", "an unexpected token: x"),
    ],
)
def test_secrets_in_a_text_are_removed(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


def test_a_listener_answers_only_who_knows_its_token() -> None:
    token = os.urandom(TOKEN_BYTES)
    listener = Listener(token)
    speed = measure("127.0.0.1", listener.port, token)
    assert not speed.stalled
    assert min(speed.round_trip, speed.one_stream, speed.several_streams) > 0
    with pytest.raises(OSError, match=r"closed the connection|reset"):
        measure("127.0.0.1", listener.port, os.urandom(TOKEN_BYTES))
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(os.urandom(TOKEN_BYTES))
        stranger.settimeout(30)
        assert stranger.recv(1) == b""
    assert reach(["127.0.0.1"], listener.port, token, 1.0) == []  # this host has it, too


def test_a_listener_serves_many_at_once() -> None:
    token = os.urandom(TOKEN_BYTES)
    listener = Listener(token)
    with contextlib.ExitStack() as opened:
        for _ in range(100):
            opened.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        assert opened.enter_context(probe._connect("127.0.0.1", listener.port, token, b"E", 30)).seen_as


class FailingSocket:
    """A listening socket whose first connection cannot be accepted."""

    def __init__(self, inner: socket.socket) -> None:
        self.inner = inner
        self.has_failed = False

    def getsockname(self) -> Any:
        return self.inner.getsockname()

    def accept(self) -> Any:
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EMFILE, "Too many open files")
        return self.inner.accept()


def test_a_listener_outlasts_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = threading.Thread
    failures = [1, 1]

    def start(**options: Any) -> threading.Thread:
        if options["target"].__name__ == "_answer" and failures:
            failures.pop()
            raise RuntimeError("can't start new thread")
        return thread(**options)

    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *args, **more: FailingSocket(create(*args, **more)))
    monkeypatch.setattr(probe.threading, "Thread", start)
    monkeypatch.setattr(probe, "_MAX_CONNECTIONS", 1)
    token = os.urandom(TOKEN_BYTES)
    listener = Listener(token)
    for _ in range(2):
        with pytest.raises(OSError, match=r"closed the connection|reset"):
            probe._connect("127.0.0.1", listener.port, token, b"E", 30)
    with probe._connect("127.0.0.1", listener.port, token, b"E", 30) as opened:
        assert opened.seen_as == "127.0.0.1"


def test_the_token_has_one_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"ab")
        with pytest.raises(TimeoutError):
            probe._receive(ours, 2, time.monotonic())
        assert probe._receive(ours, 2, time.monotonic() + 30) == b"ab"


def test_a_stream_of_which_nothing_arrives_has_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(connection: socket.socket) -> None:
        connection.sendall(struct.pack("!Qd", 0, 3.0))
        while connection.recv(1 << 20):
            pass

    monkeypatch.setattr(probe, "_count", count)
    token = os.urandom(TOKEN_BYTES)
    speed = measure("127.0.0.1", Listener(token).port, token)
    assert (speed.stalled, speed.one_stream, speed.several_streams) == (True, 0.0, 0.0)
    assert speed.round_trip > 0


def test_a_result_counts_although_its_sender_has_reset_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count(connection: socket.socket) -> None:
        connection.sendall(struct.pack("!Qd", 1000, 2.0))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def select_after_the_reset(reading: list[socket.socket], writing: list[socket.socket], *_: Any) -> Any:
        if not resets:
            end = select.poll()
            end.register(reading[0], 0)  # errors and hang-ups only
            resets.extend(end.poll(30_000))
            return [], writing, []
        return select.select(reading, writing, [], 30)

    resets: list[tuple[int, int]] = []
    monkeypatch.setattr(probe, "_count", count)
    monkeypatch.setattr(probe, "select", SimpleNamespace(select=select_after_the_reset))
    token = os.urandom(TOKEN_BYTES)
    assert probe._stream("127.0.0.1", Listener(token).port, token) == (1000, 2.0)
    assert resets


def test_pairs_of_many_hosts_are_few() -> None:
    assert _pairs(["a", "b"], 4) == [("a", "b"), ("b", "a")]
    hosts = [str(number) for number in range(100)]
    many = _pairs(hosts, 16)
    assert len(many) == len(set(many)) < 300
    assert {one for pair in many for one in pair} == set(hosts)


def route(script: str) -> DoctorRoute:
    """Returns a way to a doctor that is this script."""
    explain = lambda code, output: StartFailure("command-failed", f"ended with {code}", "", "; ".join(output))  # noqa: E731
    return DoctorRoute([sys.executable, "-c", f"import sys\n{script}"], "ssh hostB true", explain)


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ("sys.exit('\\x1b[31mno')", "command-failed", "ended with 1"),
        (f'print({MARK!r} + \'{{"hello": "0.0\\\\u001b"}}\')', "versions-differ", "has sirtaki 0.0?, and"),
        (f"print({MARK!r} + '{{\"facts\": 7}}')", "facts-malformed", "hostB has sent facts"),
        (f"print('Welcome'); print({MARK!r} + '[' * 5000)", "facts-malformed", "hostB has sent facts"),
        ("sys.stdin.read()", "host-silent", "hostB has not answered in 0.5 s"),
    ],
)
def test_a_host_that_sends_no_facts(
    script: str, kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence = 0.5 if kind == "host-silent" else 60.0
    monkeypatch.setattr(session, "ANSWER_SECONDS", silence)
    one = Session("hostB", route(script))
    found = one.facts(lambda note: None)
    one.close()
    assert isinstance(found, StartFailure)
    assert found.kind == kind
    assert text in found.what
    assert found.evidence.isprintable()


def test_a_host_whose_output_ends_before_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_CLOSE_SECONDS", 0.1)
    one = Session("hostB", route("import os; os.close(1); sys.stdin.read()"))
    found = one.facts(lambda note: None)
    assert isinstance(found, StartFailure)
    assert (found.kind, found.evidence) == ("host-silent", "its output has ended")
    assert one._child.process.wait(30) != 0
    one.close()


def test_a_question_without_an_answer() -> None:
    one = Session("hostB", route("sys.stdin.readline()"))
    with pytest.raises(SessionError, match="the connection to hostB has ended"):
        one.ask({"ask": "clock"}, 30)
    one.close()
    answer = json.dumps({"number": 1, "error": "no\nway"})
    two = Session("hostB", route(f"sys.stdin.readline(); print({MARK + answer!r})"))
    with pytest.raises(SessionError, match="hostB: no way"):
        two.ask({"ask": "clock"}, 30)
    two.close()


def test_a_late_answer_is_not_that_to_the_next_question() -> None:
    late = json.dumps({"number": 1, "answer": "late"})
    answers = "\n".join(MARK + json.dumps({"number": 2, "answer": one}) for one in ("right", "more"))
    script = f"sys.stdin.readline(); sys.stdin.readline(); print({MARK + late!r}); print({answers!r})"
    one = Session("hostB", route(script))
    with pytest.raises(SessionError, match="has not answered in 0 s"):
        one.ask({"ask": "clock"}, 0)
    assert one.ask({"ask": "clock"}, 30) == "right"
    one.close()
