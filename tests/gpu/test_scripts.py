"""The scripts for machines with GPUs, tried without one: on the fakes, where a program can run on them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import process_world
import pytest
from fake_gpu import FOLDER, needs_fake

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
PATIENCE = 1800.0  # seconds: far longer than a correct run, even on a busy machine
ALL_REDUCE_PERF = """#!/bin/sh
echo '#  size count type redop root time algbw busbw wrong time algbw busbw wrong'
echo "   $2 1 float sum -1 25.1 5.6 8.25 0 24.9 6.1 9.50 0"
"""


def dry_run(script: str, out: Path, **environment: str) -> dict[str, dict[str, Any]]:
    """Returns the results of a script's steps, by their names; asserts that none has failed."""
    path = os.pathsep.join([str(out), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {**os.environ, "OUT": str(out), "CORE_TESTS": str(FOLDER.parent), "PATH": path, **environment}
    done = subprocess.run(
        ["bash", HERE / script, "--dry-run"], env=given, capture_output=True, text=True, timeout=PATIENCE
    )
    steps = {step["name"]: step for step in json.loads((out / "results.json").read_text())}
    logs = "\n".join((out / f"{name}.log").read_text() for name, step in steps.items() if not is_well(step))
    assert not logs, f"{done.stdout}\n{logs}"
    assert done.returncode == 0, done.stderr
    for name, step in steps.items():
        assert f"{name:20} {step['outcome']}" in done.stdout
    return steps


def is_well(step: dict[str, Any]) -> bool:
    return step["outcome"] != "failed"


@needs_fake
def test_the_first_minute_on_one_gpu(tmp_path: Path) -> None:
    steps = dry_run("first_minute.sh", tmp_path)
    skipped = {name: step["note"] for name, step in steps.items() if step["outcome"] == "skipped"}
    assert set(skipped) <= {"5-jax-one-rank", "5-jax-staged"}
    assert all("ran on the CPU" in note for note in skipped.values())
    assert list(steps) == [
        *("0-facts", "1-one-rank", "2-staged", "3-two-hosts", "4-killed", "5-jax-one-rank", "5-jax-staged"),
        *("6-capture", "7-figures", "8-torch-backend"),
    ]
    assert steps["0-facts"]["figures"]["nccl_of_sirtaki"] == 22803
    assert set(steps["4-killed"]["figures"]) == {"error_after_kill_nccl_ms", "error_after_kill_staged_ms"}
    figures = steps["7-figures"]["figures"]
    assert figures["host_blocked_behind_100_ms_kernel_ms"] > 0
    assert figures["allreduce_of_400_tensors_of_4_KiB_ms"] > 0
    assert figures["most_memory_with_sirtaki_MiB"] is None  # the fakes do not count torch's memory


@needs_fake
def test_several_gpus(tmp_path: Path) -> None:
    program = tmp_path / "all_reduce_perf"
    program.write_text(ALL_REDUCE_PERF)
    program.chmod(0o755)
    steps = dry_run("several_cards.sh", tmp_path, GPUS="2")
    assert {step["outcome"] for step in steps.values()} == {"passed"}
    trained = ["4-ResNet-50", "4-BERT-large"]
    assert list(steps) == ["0-facts", "1-each-gpu", "2-beside-nccl", "3-nccl-tests", *trained]
    (first,) = steps["3-nccl-tests"]["figures"].values()
    assert "nccl-tests 9.50 GB/s" in first
    for name in trained:
        (table,) = steps[name]["tables"]
        assert "2 GPUs, DDP" in table
        assert "Horovod as published: VGG-16" in table


def run_steps(folder: Path, options: str, steps: str) -> tuple[int, list[tuple[Any, ...]]]:
    """Runs a script of these steps. Returns its exit code, and each step's results."""
    script, out = folder / "script.sh", folder / "out"
    script.write_text(f"set -- {options}\n. {HERE}/steps.sh\n{steps}\nfinish\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", script], env={**os.environ, "OUT": str(out), "PATH": path}, capture_output=True, text=True
    )
    return done.returncode, [tuple(step.values()) for step in json.loads((out / "results.json").read_text())]


def test_a_step_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    code, results = run_steps(
        tmp_path,
        "",
        "step good 5 echo 'FIGURE {\"speed\": 7}'\nstep bad 5 sh -c 'echo why; exit 3'\n"
        "step absent 5 echo 'SKIPPED: no card'\nstep late 1 sh -c 'echo began; exec sleep 30'\n"
        "step killed 5 sh -c 'echo working; kill -9 $$'",
    )
    assert code == 1
    assert [(name, outcome, note) for name, outcome, _, note, *_ in results] == [
        ("good", "passed", ""),
        ("bad", "failed", "exit code 3: why"),
        ("absent", "skipped", "no card"),
        ("late", "failed", "over its limit of 1 s; last line: began"),
        ("killed", "failed", "exit code 137: working"),
    ]
    assert results[0][4] == {"speed": 7}


HANGING = """
import runpy, sys, time
sys.path.insert(0, sys.argv[1])
import cases
sys.modules["cases.hanging"] = cases

def hang():
    time.sleep(8)

cases._cases["hanging.hang"] = cases.Case("hanging.hang", hang)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_case_that_hangs_shows_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    start = process_world.hvdrun(1, sys.executable, script, HERE.parent, SIRTAKI_TEST_PATIENCE="3")
    world = process_world.ProcessWorld(1, start)
    monkeypatch.setattr(process_world, "PATIENCE", 5.0)
    try:
        with pytest.raises(AssertionError, match=r"(?s)no answer in 5 s.*hanging\.py\", line 8 in hang"):
            world.run("hanging.hang")
    finally:
        world.close()


def test_wheels_are_installed_without_a_network(tmp_path: Path) -> None:
    description = "prepared-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "prepared-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("prepared.py", "")
        wheel.writestr(f"{description}/METADATA", "Metadata-Version: 2.1\nName: prepared\nVersion: 1.0\n")
        wheel.writestr(
            f"{description}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{description}/RECORD", "")
    code, results = run_steps(
        tmp_path, f"--wheels {tmp_path}", "step imported 60 python -c 'import prepared'"
    )
    assert (code, results[0][:2]) == (0, ("imported", "passed"))


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports modules of the benchmarks."""
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize("name", ["ResNet-50", "ResNet-101", "VGG-16", "BERT-large"])
def test_models_have_the_parameters_of_their_papers(benchmarks: Any, name: str) -> None:
    published = benchmarks("common.models").PUBLISHED[name]
    with torch.device("meta"):
        model = published.make_model(False)
    assert sum(parameter.numel() for parameter in model.parameters()) == published.parameters


def test_a_batch_is_halved_until_a_step_leaves_memory_to_the_exchange(benchmarks: Any) -> None:
    def memory_of(batch: int) -> float:
        if batch > 64:
            raise torch.cuda.OutOfMemoryError
        return batch / 80

    largest_batch = benchmarks("scaling").largest_batch
    assert largest_batch(256, memory_of) == 32
    assert largest_batch(16, memory_of) == 16
    assert largest_batch(256, lambda _: 1.0) == 0


def test_rates_become_efficiency_beside_horovods(benchmarks: Any) -> None:
    scaling = benchmarks("scaling")
    rates = {scaling.ALONE: [100.0, 110.0, 120.0], "sirtaki": [95.0, 104.5, 114.0]}
    row = {"model": "VGG-16", "gpus": 8, "device": "a GPU", "batch": 64, "parameters": 1e6, "rates": rates}
    (table,) = scaling.tables({"rows": [row]})
    assert table.rows[:2] == [
        ["1 GPU, no communication", "110.0", ""],
        ["8 GPUs, sirtaki", "104.5", "95.0% (95.0% to 95.0%)"],
    ]
    assert [cells[-1] for cells in table.rows[2:]] == ["90%", "68%"]


@pytest.mark.parametrize("sums", [(2.0, 2.1), (2.0, float("nan")), (float("nan"), 2.0)])
def test_rates_of_ranks_that_train_different_models_are_refused(
    benchmarks: Any, sums: tuple[float, float]
) -> None:
    job = SimpleNamespace(ask=lambda *_, **__: [{"rate": 1.0, "sum": found} for found in sums])
    with pytest.raises(SystemExit, match="VGG-16, sirtaki: the ranks' parameters differ"):
        benchmarks("scaling").rate(job, "VGG-16", "sirtaki")
