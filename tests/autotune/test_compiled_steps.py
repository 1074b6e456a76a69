"""The tuner of rank 0 and steps that end in compiled programs, at which it looks now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
from tuned_world import EAGER, START, World, make, replace_core

from sirtaki.common.autotune.candidates import TUNED
from sirtaki.common.autotune.compiled_steps import CompiledSteps


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    replace_core(monkeypatch)
    return World(log=str(tmp_path / "log.csv"))


def blocks_of(world: World) -> list[tuple[str, str]]:
    """Returns the last step, and the measured time, of each block in the log."""
    rows = [line.split(",") for line in Path(world.log).read_text().splitlines()[1:]]
    return [(row[0], row[-2]) for row in rows]


@pytest.mark.parametrize("late", [1, 4, 20])
def test_it_ends_with_the_fastest_settings_however_late_it_looks(
    world: World, late: int, capfd: pytest.CaptureFixture[str]
) -> None:
    tuner = make(world)
    steps = CompiledSteps(world.counters, tuner)  # type: ignore[arg-type]
    while steps.look() is not None:
        for _ in range(late):
            world.step_compiled()
    assert tuner.is_over
    # Nothing else is better; hand_over is not tried.
    assert {name for name in TUNED if world.in_use[name] != START[name]} == {"chunk_bytes"}
    said = f"Kept chunk_bytes={world.in_use['chunk_bytes']} (before: 4096): steps took 50% of the time"
    assert said in capfd.readouterr().err


def test_a_block_begins_with_the_step_after_the_one_that_runs(world: World) -> None:
    steps = CompiledSteps(world.counters, make(world))  # type: ignore[arg-type]
    pauses = []
    for _ in range(24):
        world.step_compiled()
        pauses.append(steps.look())
    assert [number for number, _ in blocks_of(world)] == ["16", "22"]
    assert pauses[:10] == [*[pytest.approx(missing * 0.012) for missing in range(9, 0, -1)], 0.002]


def test_a_step_with_the_settings_before_is_not_measured(world: World) -> None:
    steps = CompiledSteps(world.counters, make(world))  # type: ignore[arg-type]
    times = []
    for _ in range(60):
        for _ in range(3):
            world.step_compiled()
        before = world.in_use["chunk_bytes"]
        steps.look()
        if len(blocks_of(world)) > len(times):
            times.append("0.012000" if before == "4096" else "0.006000")
    assert len(times) == 60 // 2 - 2
    assert [time for _, time in blocks_of(world)] == times


def test_nothing_is_tuned_if_several_optimizers_step(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    tuner = make(world)
    steps = CompiledSteps(world.counters, tuner)  # type: ignore[arg-type]
    world.step_compiled(by=7)
    assert steps.look() is not None
    world.step_compiled(by=8)
    assert steps.look() is None
    assert not tuner.is_over  # steps in Python may follow
    for callback in world.shutdown_callbacks:
        callback()
    assert "only if one optimizer takes all steps" in capfd.readouterr().err


def test_it_ends_with_what_is_proven_if_another_optimizer_begins(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    tuner = make(world)
    steps = CompiledSteps(world.counters, tuner)  # type: ignore[arg-type]
    while tuner.findings is None or not tuner.findings.changes:
        world.step_compiled()
        steps.look()
    world.step_compiled(by=8)
    assert steps.look() is None
    assert tuner.is_over
    assert world.in_use == tuner.findings.kept
    assert world.in_use["chunk_bytes"] != "4096"
    assert f"hvdrun --chunk-bytes {world.in_use['chunk_bytes']}, or" in capfd.readouterr().err


def test_steps_in_python_do_not_wait_for_a_look(world: World) -> None:
    tuner = make(world)
    steps = CompiledSteps(world.counters, tuner)  # type: ignore[arg-type]
    while not tuner.is_over:
        world.step(EAGER)
    assert steps.look() is None
    assert world.in_use["chunk_bytes"] != "4096"
