"""hvdrun's own messages never contain terminal escape sequences, whatever the source of their text."""

from __future__ import annotations

import json
import os
import selectors
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind, WireError
from sirtaki.runner.hosts.channel import INITIAL_CREDIT
from sirtaki.runner.hosts.remote import RemoteHost, RemoteJob, RemoteRank
from sirtaki.runner.hosts.ssh import SshOptions
from sirtaki.runner.supervise.display import Display
from sirtaki.runner.supervise.post_mortem import PostMortem


def said(text: str, capfd: pytest.CaptureFixture[str]) -> str:
    with selectors.PollSelector() as selector:
        display = Display(selector)
        display.say(text)
        while not display.all_shown:
            for key, _ in selector.select():
                key.data()
    return capfd.readouterr().err


def test_no_terminal_obeys_what_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert said("rank 1 gave up: \x1b]0;title\x07\x9b2J \u202etxt.exe", capfd) == (
        "hvdrun: rank 1 gave up: ?]0;title??2J ?txt.exe\n"
    )
    assert said("two\nlines, and what is no UTF-8: \udcff", capfd) == (
        "hvdrun: two\n  lines, and what is no UTF-8: ?\n"
    )
    assert len(said("x" * 100_000, capfd)) < 10_000


def test_what_a_login_prints_commands_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """ssh's standard error carries another machine's text before any peer is authenticated."""
    reading, writing = os.pipe()
    os.write(writing, b"\x1b]0;title\x07 welcome \x1b[2J\r\n" + b"x" * 50_000 + b"\n")
    os.close(writing)
    with selectors.PollSelector() as selector:
        display = Display(selector)
        display.read_host("hostB", reading)
        display.close_streams()
        while not display.all_shown:
            for key, _ in selector.select():
                key.data()
    shown = capfd.readouterr().err
    assert shown.startswith("[hostB] ?]0;title? welcome ?[2J\n")
    assert len(shown) < 10_000


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"rank": ' + "9" * 400 + "}", '{"a":' * 50_000, '"x"', "[]", "\0", '{"stack": [[]]}'],
    ids=["deep", "huge number", "deep and open", "text", "list", "zero", "stack"],
)
def test_a_report_of_any_shape_crashes_nobody(content: str, tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(content)
    number = {"name": "x", "kind": "y", "state": "moving", "submitted_seconds_ago": 10**400}
    (tmp_path / "rank1.json").write_text(json.dumps({**REPORT, "unfinished": [number]}))
    (tmp_path / "rank2.json").write_text(json.dumps({**REPORT, "rank": 2}))
    told = PostMortem(3, tmp_path).lines("failed")
    assert any("rank 2 (pid 7" in line for line in told)


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
REPORT = {"rank": 0, "pid": 7, "host": "hostA", "stack": [], "unfinished": []}


@given(report=st.fixed_dictionaries({}, optional=dict.fromkeys(REPORT, values)) | values)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_report_that_is_none_is_left_out(report: object, tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps(report))
    (tmp_path / "rank1.json").write_text(json.dumps({**REPORT, "rank": 1}))
    told = PostMortem(2, tmp_path).lines("failed")
    assert any("rank 1 (pid 7" in line for line in told)


class Shown:
    """A display that only counts bytes."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, rank: int, number: int, data: bytes) -> None:
        self.count += len(data)


def test_a_host_cannot_fill_the_memory_of_hvdrun() -> None:
    """An agent may send output up to the granted room; an agent that sends more is dropped."""
    shown = Shown()
    with selectors.PollSelector() as selector:
        host = RemoteHost("hostB", SshOptions(), selector, shown)  # type: ignore[arg-type]
        ranks = {0: RemoteRank(0, host)}
        host._job = RemoteJob(ranks, PostMortem(1, Path("/nowhere")), lambda *_: None, lambda: None)
        part = Frame(MessageKind.STDOUT, 0, bytes(INITIAL_CREDIT // 4))
        for _ in range(4):
            host._receive(part)
        with pytest.raises(WireError, match=f"than the {INITIAL_CREDIT} bytes there was room for"):
            host._receive(part)
    assert shown.count == INITIAL_CREDIT
