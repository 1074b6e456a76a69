"""What hvdrun says of its own accord never commands the terminal, whoever's words are in it."""

from __future__ import annotations

import json
import selectors
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sirtaki.runner.display import Display
from sirtaki.runner.epilogue import Epilogue


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
        "hvdrun: two\nlines, and what is no UTF-8: ?\n"
    )
    assert len(said("x" * 100_000, capfd)) < 10_000


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
    told = Epilogue(2, tmp_path).lines(failed=True)
    assert any("rank 1 (pid 7" in line for line in told)
