"""The tuner of rank 0 and steps that end in compiled programs, at which it looks now and then."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
from process_world import PATIENCE
from tuned_world import EAGER, START, World, make, replace_core

from sirtaki.bindings.errors import PeerLostError
from sirtaki.common.autotune import tuner, tuner_of
from sirtaki.common.autotune.model import TUNED
from sirtaki.common.autotune.tuner import CompiledSteps, Tuner


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    replace_core(monkeypatch)
    return World(log=str(tmp_path / "log.csv"))


def watch(world: World, tuner: Tuner) -> CompiledSteps:
    return CompiledSteps(world, tuner)  # type: ignore[arg-type]


def blocks_of(world: World) -> list[tuple[str, str]]:
    """Returns the last step, and the measured time, of each block in the log."""
    rows = [line.split(",") for line in Path(world.log).read_text().splitlines()[1:]]
    return [(row[0], row[-2]) for row in rows]


@pytest.mark.parametrize("late", [1, 4, 20])
def test_it_ends_with_the_fastest_settings_however_late_it_looks(
    world: World, late: int, capfd: pytest.CaptureFixture[str]
) -> None:
    tuner = make(world)
    steps = watch(world, tuner)
    while steps.look() is not None:
        for _ in range(late):
            world.step_compiled()
    assert tuner.is_over
    # Nothing else is better; hand_over is not tried.
    assert {name for name in TUNED if world.in_use[name] != START[name]} == {"chunk_bytes"}
    said = f"Kept chunk_bytes={world.in_use['chunk_bytes']} (before: 4096): steps took 50% of the time"
    assert said in capfd.readouterr().err


def test_a_block_begins_with_the_step_after_the_one_that_runs(world: World) -> None:
    steps = watch(world, make(world))
    pauses = []
    for _ in range(24):
        world.step_compiled()
        pauses.append(steps.look())
    assert [number for number, _ in blocks_of(world)] == ["16", "22"]
    assert pauses[:10] == [*[pytest.approx(missing * 0.012) for missing in range(9, 0, -1)], 0.002]


def test_a_block_that_begins_late_begins_with_the_step_after_the_one_that_runs_too(world: World) -> None:
    steps = watch(world, make(world))
    for number in range(1, 25):
        world.step_compiled()
        if number == 10 or number >= 17:
            steps.look()
    assert [number for number, _ in blocks_of(world)] == ["16", "24"]  # of steps 20 to 24


def test_a_step_with_the_settings_before_is_not_measured(world: World) -> None:
    steps = watch(world, make(world))
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


@pytest.mark.parametrize("late", [1, 3, 7])
def test_blocks_of_steps_that_differ_in_turns_have_one_median(world: World, late: int) -> None:
    steps = watch(world, make(world))
    world.in_use["chunk_bytes"] = "524288"
    for number in range(24 * late):
        world.pause = number % 2 * 0.5
        world.step_compiled()
        if number % late == late - 1:
            steps.look()
    blocks = [(int(step), time) for step, time in blocks_of(world)]
    assert len(blocks) >= 2
    assert {step % 2 for step, _ in blocks} == {0}
    assert len({time for _, time in blocks}) == 1


def test_the_first_steps_are_those_of_one_optimizer(world: World) -> None:
    steps = watch(world, make(world))
    for by, number in ((7, 9), (8, 16)):
        for _ in range(number):
            world.step_compiled(by)
            steps.look()
    assert [number for number, _ in blocks_of(world)] == ["16"]


def test_it_ends_with_what_is_proven_if_another_optimizer_follows(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    tuner = make(world)
    steps = watch(world, tuner)
    while tuner.findings is None or not tuner.findings.changes or world.in_use == tuner.findings.kept:
        world.step_compiled()
        steps.look()
    last = blocks_of(world)[-1][0]
    world.step_compiled(by=8)
    steps.look()
    assert tuner.is_over
    assert world.in_use == tuner.findings.kept
    assert world.in_use["chunk_bytes"] != "4096"
    assert f"hvdrun --chunk-bytes {world.in_use['chunk_bytes']}, or" in capfd.readouterr().err
    assert blocks_of(world)[-1][0] == last  # the other one has only begun
    assert steps.look() is None


def test_a_training_that_ends_early_has_all_its_steps_in_the_record(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = watch(world, make(world))
    for _ in range(38):
        world.step_compiled()
        steps.look()
    for callback in world.shutdown_callbacks:
        callback()
    assert [number for number, _ in blocks_of(world)] == ["16", "22", "28", "34", "38"]
    assert "in 38 steps, " in capfd.readouterr().err
    assert steps.look() is None


def test_steps_in_python_before_those_of_a_program_are_not_measured(world: World) -> None:
    tuner = make(world)
    steps = watch(world, tuner)
    for _ in range(9):
        world.step(EAGER)
        steps.look()
    for number in range(16):
        world.step_compiled()
        steps.look()
        if number >= 9:  # they have replaced the optimizer
            world.step(EAGER)
    assert [number for number, _ in blocks_of(world)] == ["16"]


def test_steps_of_a_program_after_those_in_python_do_not_count(world: World) -> None:
    tuner = make(world)
    steps = watch(world, tuner)
    for _ in range(10):
        world.step(EAGER)
    for _ in range(10):
        world.step_compiled()
        assert steps.look() is not None
    for _ in range(6):
        world.step(EAGER)
    assert [number for number, _ in blocks_of(world)] == ["16"]


def test_steps_of_others_between_those_of_a_program_do_not_end_it(world: World) -> None:
    tuner = make(world)
    steps = watch(world, tuner)
    for number in range(16):
        world.step_compiled()
        steps.look()
        for _ in range(300 if number >= 9 else 0):
            world.step(EAGER)
    assert [number for number, _ in blocks_of(world)] == ["16"]
    assert not tuner.is_over


def test_a_program_that_ends_before_a_look_was_too_short(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    make(world)
    for _ in range(100):
        world.step_compiled()
    for callback in world.shutdown_callbacks:
        callback()
    assert "the training ended before it could compare any change." in capfd.readouterr().err


def test_no_setting_on_trial_stays_when_the_thread_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tuner = make(world)
    steps = watch(world, tuner)
    for _ in range(20):
        world.step_compiled()
        steps.look()
    assert world.in_use != START
    monkeypatch.setattr(steps, "look", lambda: {}["broken"])
    with pytest.raises(KeyError):
        steps._watch()
    assert tuner.is_over
    assert world.in_use == START
    assert ", and its steps could not be measured any more before all" in capfd.readouterr().err


@pytest.mark.parametrize("begins", ["in Python", "compiled"])
def test_it_ends_if_its_optimizer_takes_no_more_steps(
    world: World, begins: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tuner = make(world)
    steps = watch(world, tuner)

    def take(compiled: bool, number: int) -> None:
        for _ in range(number):
            if compiled:
                world.step_compiled()
            else:
                world.step(EAGER)
            steps.look()

    take(begins == "compiled", 20)
    assert tuner.findings is not None
    assert world.in_use["chunk_bytes"] != START["chunk_bytes"]  # it is tried
    take(begins != "compiled", 900)
    take(begins == "compiled", 6)
    take(begins != "compiled", 900)
    assert not tuner.is_over
    take(begins != "compiled", 1100)  # the thread counts the measured ones of each block: 5 of 6
    take(begins != "compiled", 200)
    assert tuner.is_over
    assert world.in_use == START == tuner.findings.kept
    assert ", and its optimizer took no more steps before all were compared" in capfd.readouterr().err


def test_steps_in_python_do_not_wait_for_a_look(world: World) -> None:
    tuner = make(world)
    steps = watch(world, tuner)
    while not tuner.is_over:
        world.step(EAGER)
    assert steps.look() is None
    assert world.in_use["chunk_bytes"] != "4096"


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "sirtaki-autotune"]


def test_the_thread_ends_when_the_world_is_shut_down(world: World) -> None:
    assert tuner_of(world) is not None  # type: ignore[arg-type]
    assert len(threads()) == 1
    for callback in world.shutdown_callbacks:
        callback()
    assert threads() == []


def test_the_thread_ends_with_a_world_that_is_dropped() -> None:
    world = World()
    steps = watch(world, Tuner(world))  # type: ignore[arg-type]
    steps.start()
    (thread,) = threads()
    del world
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert steps.look() is None


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_ends_silently_when_the_world_has_failed(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise PeerLostError("rank 1 is lost")

    monkeypatch.setattr(tuner, "change_setting", fail)
    steps = watch(world, make(world))
    for _ in range(20):
        world.step_compiled()
    steps.start()
    for thread in threads():
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert capfd.readouterr().err == ""
    for callback in world.shutdown_callbacks:
        callback()
    assert capfd.readouterr().err.startswith("sirtaki: autotune has tried ")
