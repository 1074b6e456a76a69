"""`sirtaki trace report`: what a rank's program did while the others waited for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_timelines import Call, Clock, Did, add_program, report, write_job

from sirtaki.runner.cli import commands

LINES, COLLECTION = "lines of the program", "garbage collection"
OTHER_HOST = Clock("hostb", 7_000_000_123)
# Rank 1 is late by 500 µs in steps 2 and 6: rank 0 has submitted at 2000 and 6000.
LATE = (2, 6)
STEPS = 8


def write_late_job(folder: Path, clock: Clock) -> Path:
    ranks: list[list[Call]] = [[], []]
    for n in range(1, STEPS + 1):
        late = 500 if n in LATE else 0
        for rank in range(2):
            known = n * 1000 + late + 5
            ranks[rank].append(Call("a", n, n * 1000 + late * rank, known, known + 5))
    return write_job(folder, ranks, (Clock("hosta"), clock))


def late_rank(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[Any], str, str]:
    """Returns what rank 1 did meanwhile, the evidence against it and its remedy."""
    found = report(capsys, path)
    (warning,) = (one for one in found["findings"] if one["rule"] == "pausing-rank")
    meanwhile = [(one["what"], round(one["share"], 6)) for one in found["ranks"][1]["meanwhile"]]
    assert found["ranks"][0]["meanwhile"] == []
    return meanwhile, warning["evidence"], warning["remedy"]


@pytest.mark.parametrize("clock", [Clock("hosta"), OTHER_HOST])
@pytest.mark.parametrize("is_merged", [False, True])
def test_a_pause_and_the_line_around_it_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: Clock, is_merged: bool
) -> None:
    path = write_late_job(tmp_path, clock)
    done = [
        Did(LINES, "in load() at train.py:4", 1100, 2300),  # 300 of the 500 µs in step 2
        Did(COLLECTION, COLLECTION, 1900, 2250),  # 250
        Did(COLLECTION, COLLECTION, 3000, 3900),  # while nobody waits
        Did(LINES, "at train.py:9", 2300, 2500),  # 200
        Did(COLLECTION, COLLECTION, 6000, 6500),  # 500
        Did(LINES, "at train.py:9", 5500, 6250),  # 250
        Did("no free core", "no free core", 6400, 6500),  # 100: too little to be a reason
    ]
    add_program(path.with_name("t.json.rank1"), 1, done, clock)
    if is_merged:
        merged = tmp_path / "job.json"
        assert commands.main(["trace", "merge", str(path), "-o", str(merged)]) == 0
        capsys.readouterr()
        path = merged
    meanwhile, evidence, remedy = late_rank(path, capsys)
    assert meanwhile == [(COLLECTION, 0.75), ("at train.py:9", 0.45)]
    assert evidence.endswith(
        "; mostly in 2 of 8 steps: 2, 6; meanwhile: garbage collection 75 %, at train.py:9 45 %"
    )
    assert "gc.freeze()" in remedy


def test_a_line_alone_is_named_in_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_late_job(tmp_path, Clock("hosta"))
    done = [Did(LINES, "in save() at train.py:12", n * 1000, n * 1000 + 480) for n in LATE]
    add_program(path.with_name("t.json.rank1"), 1, done)
    meanwhile, _, remedy = late_rank(path, capsys)
    assert meanwhile == [("in save() at train.py:12", 0.96)]
    assert remedy.endswith("see what the line in save() at train.py:12 waits for or computes")


def test_without_any_reason_the_usual_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meanwhile, evidence, remedy = late_rank(write_late_job(tmp_path, Clock("hosta")), capsys)
    assert meanwhile == []
    assert evidence.endswith("; mostly in 2 of 8 steps: 2, 6")
    assert "garbage collection, loading of data" in remedy


def test_a_damaged_slice_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_late_job(tmp_path, Clock("hosta"))
    done = [Did(COLLECTION, COLLECTION, 2000, 2500), Did(COLLECTION, COLLECTION, 2400, 2600)]  # overlap
    add_program(path.with_name("t.json.rank1"), 1, done)
    found = report(capsys, path)
    assert "1 line is damaged in t.json.rank1" in json.dumps(found["findings"])
    assert [one["share"] for one in found["ranks"][1]["meanwhile"]] == [0.5]
