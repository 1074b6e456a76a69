"""The model in the tuner of rank 0: when it knows a job, and what is left out, recorded and said."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from tuned_world import EAGER, START, TORCH, World, make, replace_core

from sirtaki.bindings.observing.step_counters import Stepper
from sirtaki.common.autotune.model import TunedJob, candidates
from sirtaki.common.autotune.tuner import Tuner
from sirtaki.runner.cli.knobs import loaded_settings

K, M = 1 << 10, 1 << 20
SMALL_STEP = [
    "chunk_bytes=1048576: a step has fewer bytes than this and chunk_bytes=524288",
    "fusion_threshold=4194304: a step has fewer bytes than both values",
    "report_bytes=16777216: a step has fewer bytes than both values",
]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    replace_core(monkeypatch)
    return World(log=str(tmp_path / "log.csv"))


def tune(world: World, optimizer: Stepper = TORCH) -> Tuner:
    """Takes steps until the search ends."""
    tuner = make(world)
    while not tuner.is_over:
        world.step(optimizer)
    return tuner


def rows_of(world: World) -> list[dict[str, str]]:
    with Path(world.log).open(newline="") as file:
        return list(csv.DictReader(file))


def left_out(tuner: Tuner) -> list[str]:
    assert tuner.findings is not None
    return [f"{one.change}: {one.reason}" for one in tuner.findings.left_out]


def test_what_changes_nothing_is_left_out_and_said(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    world.bytes = 200 * K
    tuner = tune(world)
    assert tuner.findings is not None
    assert left_out(tuner) == SMALL_STEP
    assert tuner.findings.tried == len(candidates(START)) - len(SMALL_STEP)
    assert world.in_use["chunk_bytes"] in ("131072", "262144", "524288")  # they are equally fast
    assert world.in_use["hand_over"] == "late"
    said = capfd.readouterr().err
    assert (
        "The first steps exchanged 200 KiB in 1 plan a step; 1 ms a plan of 64 KiB to 256 KiB; 0.2 GB/s. 3 "
        "changes were left out: chunk_bytes=1048576, because a step has fewer bytes than this and "
        "chunk_bytes=524288; fusion_threshold=4194304, report_bytes=16777216, because a step has fewer bytes "
        "than both values. Kept chunk_bytes="
    ) in said


def test_the_log_has_the_model_before_the_blocks(world: World) -> None:
    world.bytes = 200 * K
    tune(world)
    model, *rows = rows_of(world)
    assert model == {
        "step": "10",
        "purpose": "model: 200 KiB in 1 plan a step; 1 ms a plan of 64 KiB to 256 KiB; 0.2 GB/s",
        **START,
        "step_seconds": "0.012000",  # the median of steps 4 to 10, of which one has an evaluation
        "verdict": "",
    }
    assert [row["purpose"] for row in rows[:3]] == SMALL_STEP
    assert [(row["step"], row["step_seconds"], row["verdict"]) for row in rows[:3]] == [
        ("10", "", "left out")
    ] * 3
    assert [row["fusion_threshold"] for row in rows[:3]] == ["67108864", "4194304", "67108864"]
    assert not {row["purpose"].partition("try ")[2] for row in rows} & {
        one.partition(":")[0] for one in SMALL_STEP
    }
    loaded = loaded_settings(Path(world.log), START)
    assert loaded["SIRTAKI_HAND_OVER"] == "late"
    assert loaded["SIRTAKI_CHUNK_BYTES"] == world.in_use["chunk_bytes"]


def test_the_change_with_the_largest_bound_is_tried_first(world: World) -> None:
    world.bytes = 200 * K
    tune(world)
    tried = [row["purpose"] for row in rows_of(world) if row["purpose"].startswith("try ")]
    assert tried[0] == "try hand_over=late"


def test_a_short_exchange_ends_the_search_at_once(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """The steps take 12 ms, so that polls of 0.2 ms alone would be beyond the margin."""
    world.bytes, world.moving, world.pause = 200 * M, 0.002, 1.0
    tuner = tune(world)
    assert world.taken == 10
    assert world.in_use == START
    assert tuner.findings is not None
    assert tuner.findings.is_finished
    assert tuner.findings.tried == 0
    assert len(left_out(tuner)) == len(candidates(START))
    assert capfd.readouterr().err == (
        "sirtaki: autotune has tried no change of settings, because the first 10 steps have shown that none "
        "can make steps faster by 2%. The first steps exchanged 200 MiB in 1 plan a step; 2 ms a plan of 64 "
        "MiB to 256 MiB; 105 GB/s. 11 changes were left out: all, because no more than 0.5% of a step could "
        "be saved.\n"
    )
    assert loaded_settings(Path(world.log), START)["SIRTAKI_CHUNK_BYTES"] == "0"
    world.step()  # it listens no longer


def test_a_loaded_log_begins_where_it_ended(world: World) -> None:
    world.bytes, world.pause = 200 * K, 1.0
    tune(world)
    assert rows_of(world)[-1]["verdict"] == "kept"
    assert {name: rows_of(world)[-1][name] for name in START} == {**START, "chunk_bytes": "0"}


@pytest.mark.parametrize(
    "unknown", [{"bytes": 0}, {"job": None}], ids=["nothing has moved", "there are process sets"]
)
def test_a_job_that_is_not_known_has_no_model(
    unknown: dict[str, Any], world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    world.bytes, world.pause = K, 1.0
    vars(world).update(unknown)
    tuner = tune(world)
    assert left_out(tuner) == []
    assert tuner.findings is not None
    assert tuner.findings.tried == len(candidates(START))
    assert rows_of(world)[0]["step"] == "16"
    said = capfd.readouterr().err
    assert "left out" not in said
    assert "The first steps" not in said


def test_several_optimizers_have_no_model(world: World) -> None:
    world.bytes, world.pause = K, 1.0
    tuner = make(world)
    while tuner.findings is None:
        world.step()
        if world.taken == 8:
            world.counters.end(by=Stepper("gradient.1"))
    assert left_out(tuner) == []


def test_the_first_three_steps_are_no_part_of_the_model(world: World) -> None:
    world.bytes = M
    tuner = make(world)
    for _ in range(2):
        world.step()
    world.counters.end()  # of a compiled program, such as a warm-up
    world.bytes = 0
    world.taken = 0
    world.step()
    world.bytes = 200 * K
    world.taken = 0
    while tuner.findings is None:
        world.step()
    assert left_out(tuner) == SMALL_STEP


def test_an_optimizer_that_hands_nothing_over_has_no_such_change(world: World) -> None:
    world.bytes, world.pause = 200 * M, 1.0
    found = left_out(tune(world, EAGER))
    assert len(found) == len(candidates(START)) - 2
    assert not any(one.startswith("hand_over") for one in found)


def test_few_gradients_are_not_handed_over(world: World) -> None:
    world.bytes, world.job = 200 * K, TunedJob(1, operations=3, bytes=200 * K, parts=1)
    found = left_out(tune(world))
    assert found[:2] == [
        f"hand_over={value}: the gradients of a step are too few to be handed over in parts"
        for value in ("early", "late")
    ]
