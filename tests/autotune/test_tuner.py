"""The tuner of rank 0, on a clock that only the settings in use drive; and what it reports."""

from __future__ import annotations

import csv
import threading
from pathlib import Path
from typing import Any

import pytest
from tuned_world import EAGER, START, World, make, replace_core

from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.common.autotune import tuner_of
from sirtaki.common.autotune.model import TUNED


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    replace_core(monkeypatch)
    return World(log=str(tmp_path / "log.csv"))


def test_it_ends_with_the_fastest_settings_in_use(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    tuner = make(world)
    while not tuner.is_over:
        world.step()
    assert world.in_use["hand_over"] == "late"
    assert world.in_use["chunk_bytes"] == "131072"
    assert {name for name in TUNED if world.in_use[name] != START[name]} == {"hand_over", "chunk_bytes"}
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "Kept chunk_bytes=131072 (before: 4096): steps took 50% of the time" in said
    assert "Kept hand_over=late (before: auto): steps took 67% of the time" in said
    assert "With all changes, steps took 33% of the time of the start" in said
    assert "hvdrun --hand-over late --chunk-bytes 131072, or --autotune-load" in said

    world.in_use["spin"] = "0"
    world.step()
    assert world.in_use["spin"] == "0"  # it changes nothing any more
    for callback in world.shutdown_callbacks:
        callback()
    assert capfd.readouterr().err == ""  # and reports once


def test_a_training_that_ends_early_keeps_what_was_proven(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    tuner = make(world)
    while tuner.findings is None or not tuner.findings.changes:
        world.step()
    for callback in world.shutdown_callbacks:
        callback()
    said = capfd.readouterr().err
    assert "and the training ended before all were compared" in said
    assert "hvdrun --chunk-bytes 131072, or" in said
    last = Path(world.log).read_text().splitlines()[-1]
    assert last == f"{world.taken},result,auto,131072,67108864,1048576,0.0003,0.0002,,kept"


def test_steps_of_a_second_optimizer_do_not_count(world: World) -> None:
    make(world)
    for _ in range(30):
        world.step()
        world.counters.end(by=Stepper("gradient.1"))
        world.counters.end()  # of a compiled program
    lines = Path(world.log).read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == ["16", "22", "28"]
    assert {line.split(",")[-2] for line in lines} == {"0.012000"}


def test_an_optimizer_that_stops_before_it_is_measured_is_replaced(world: World) -> None:
    tuner = make(world)
    for _ in range(9):
        world.step()
    for _ in range(999):
        world.step(EAGER)
    assert tuner.findings is None
    for _ in range(16):
        world.step(EAGER)
    rows = [line.split(",") for line in Path(world.log).read_text().splitlines()]
    assert [row[0] for row in rows[1:]] == ["16"]


def test_an_optimizer_without_a_hand_over_has_no_change_of_it(world: World) -> None:
    tuner = make(world)
    while not tuner.is_over:
        world.step(EAGER)
    assert world.in_use["chunk_bytes"] != "4096"
    rows = [line.split(",") for line in Path(world.log).read_text().splitlines()]
    assert {row[rows[0].index("hand_over")] for row in rows[1:]} == {"auto"}


def test_a_second_world_of_a_process_continues_the_log(world: World) -> None:
    tuner = make(world)
    while not tuner.is_over:
        world.step()
    first = Path(world.log).read_text()
    second = World(log=world.log)
    make(second)
    for callback in second.shutdown_callbacks:  # nothing was measured: the result stays
        callback()
    assert Path(world.log).read_text() == first
    third = World(log=world.log)
    tuner = make(third)
    while not tuner.is_over:
        third.step()
    whole = Path(world.log).read_text()
    assert whole == first + first.partition("\n")[2]
    Path(world.log).unlink()
    make(World(log=world.log))
    assert Path(world.log).read_text().startswith("step,purpose,")


def test_a_job_without_steps_says_so(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    make(world)
    for callback in world.shutdown_callbacks:
        callback()
    assert "autotune has measured nothing, and changed nothing" in capfd.readouterr().err
    assert len(Path(world.log).read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "change", [{"rank": 1}, {"size": 1}, {"autotune": "0"}, {"survivors": "some"}], ids=str
)
def test_other_ranks_and_worlds_have_no_tuner(change: dict[str, Any]) -> None:
    assert tuner_of(World(**change)) is None  # type: ignore[arg-type]


def test_a_world_has_one_tuner(world: World) -> None:
    assert tuner_of(world) is tuner_of(world)  # type: ignore[arg-type]
    assert [one.name for one in threading.enumerate()].count("sirtaki-autotune") == 1
    for callback in world.shutdown_callbacks:
        callback()


@pytest.mark.parametrize(("start", "logged"), [("4096", "131072"), ("262144", "0")])
def test_an_unchanged_size_of_chunks_is_logged_as_it_was_set(world: World, start: str, logged: str) -> None:
    """Covers 0, for which each host has its own size: another job would start with that of rank 0."""
    world.in_use["chunk_bytes"] = start
    tuner = make(world)
    while not tuner.is_over:
        world.step()
    header, last = [Path(world.log).read_text().splitlines()[at].split(",") for at in (0, -1)]
    assert dict(zip(header, last, strict=True))["chunk_bytes"] == logged


def test_a_disk_that_becomes_full_ends_no_training(world: World) -> None:
    tuner = make(world)
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115  # the tuner closes it
    tuner._log._file, tuner._log._lines = full, csv.writer(full)
    while not tuner.is_over:
        world.step()
    assert full.closed
    assert world.in_use["hand_over"] == "late"


def test_a_disk_that_is_full_is_named_at_the_start(world: World) -> None:
    world.log = "/dev/full"
    with pytest.raises(ValueError, match="autotune_log: cannot write /dev/full: No space left"):
        make(world)
