"""The page about traces: the report of its program names the rank that pauses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sirtaki.runner.cli import commands

from .pages import output_of, programs_of


def test_the_report_names_the_rank_that_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (program,) = programs_of("trace.md")
    timeline = tmp_path / "timeline.json"
    monkeypatch.setenv("SIRTAKI_TIMELINE", str(timeline))
    output_of(program, 2, tmp_path)
    assert commands.main(["trace", "report", str(timeline), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["steps"]) == 40
    assert any(one["what"].startswith("the others wait for rank 1 in ") for one in found["findings"])
    steps = {one["step"] for one in found["ranks"][1]["late_steps"]}
    assert steps & {10, 20, 30, 40}
