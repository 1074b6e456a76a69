"""Whole programs with torch: imported modules, the example's learning, forks, errors and Ctrl-C."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, run
from tiers import exhaustive_unless

pytest.importorskip("torch")

PROGRAMS = Path(__file__).with_name("programs_torch.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "pytorch_digits.py"
COMPRESSED = EXAMPLES / "compression_digits.py"
SHARDED = EXAMPLES / "sharding_digits.py"
LOCAL_STEPS = EXAMPLES / "local_sgd_digits.py"
STALE = EXAMPLES / "staleness_digits.py"
DEADLINE = EXAMPLES / "deadline_digits.py"
OVERLAPPED = EXAMPLES / "overlap_digits.py"
PARALLEL_LINEAR = EXAMPLES / "pytorch_parallel_linear.py"


def test_no_framework_is_imported_before_it_is_asked_for() -> None:
    code = """
import sys, sirtaki
assert "torch" not in sys.modules and "numpy" not in sys.modules
import torch
before = set(sys.modules)
import sirtaki.torch
new = {name for name in set(sys.modules) - before if name.startswith(("torch", "numpy"))}
assert not new, new
"""
    finished = run(sys.executable, "-c", code)
    assert finished.returncode == 0, finished.stderr


def test_programs_in_one_job(tmp_path: Path) -> None:
    programs = ("loader_workers", "interrupted_wait", "beside_ddp", "old_optimizers")
    finished = run(*hvdrun(2, sys.executable, PROGRAMS, ",".join(programs), tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for program in programs:
        assert finished.stdout.count(f"{program} is done") == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_a_compiled_model(tmp_path: Path) -> None:
    finished = run(*hvdrun(2, sys.executable, PROGRAMS, "compiled_model", tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("is done") == 2


def test_an_error_on_one_rank_comes_out_of_the_others_backward(tmp_path: Path) -> None:
    finished = run(*hvdrun(2, sys.executable, PROGRAMS, "error_on_one_rank", tmp_path))
    assert finished.returncode == 1
    seen = (tmp_path / "seen").read_text()
    assert "no batch is left" in seen
    assert "rank 1" in seen
    assert "ArithmeticError: no batch is left" in finished.stdout + finished.stderr


def epochs(finished: subprocess.CompletedProcess[str]) -> list[float]:
    """Returns the test accuracy after each epoch, in percent."""
    assert finished.returncode == 0, finished.stdout + finished.stderr
    reports = re.findall(r"epoch +(\d+): loss [\d.]+, test accuracy ([\d.]+)%", finished.stdout)
    assert [int(epoch) for epoch, _ in reports] == list(range(1, len(reports) + 1))
    return [float(accuracy) for _, accuracy in reports]


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=exhaustive_unless(ranks == 2)) for ranks in (2, 4)]
)
def test_the_digits_example_learns(ranks: int) -> None:
    pytest.importorskip("sklearn")
    assert epochs(run(*hvdrun(ranks, sys.executable, DIGITS)))[-1] >= 97


@pytest.mark.parametrize(
    "compression",
    [pytest.param(one, marks=exhaustive_unless(one == "powersgd")) for one in ("powersgd", "topk", "onebit")],
)
def test_the_example_with_compressed_gradients_learns(compression: str) -> None:
    pytest.importorskip("sklearn")
    finished = run(*hvdrun(2, sys.executable, COMPRESSED, "--compression", compression))
    assert epochs(finished)[-1] >= 93
    found = re.search(r"([\d,]+) bytes instead of ([\d,]+)", finished.stdout)
    assert found is not None
    sent, exact = (int(one.replace(",", "")) for one in found.groups())
    assert 0 < sent < 0.1 * exact


def test_the_example_with_divided_state_continues_on_other_ranks(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    kept, correct = {}, []
    for ranks, shard in ((2, "gradients"), (3, "state"), (1, "none")):
        options = ("--shard", shard, "--epochs", "2", "--checkpoint", tmp_path / "saved.pt")
        finished = run(*hvdrun(ranks, sys.executable, SHARDED, *options))
        assert finished.returncode == 0, finished.stdout + finished.stderr
        reports = re.findall(r"epoch +(\d+): loss [\d.]+, test accuracy ([\d.]+)%", finished.stdout)
        correct += [(int(epoch), float(percent)) for epoch, percent in reports]
        found = re.search(r"keeps ([\d,]+) bytes", finished.stdout)
        assert found is not None
        kept[ranks] = int(found[1].replace(",", ""))
    assert [epoch for epoch, _ in correct] == [1, 2, 3, 4, 5, 6]
    assert correct[-1][1] >= 93
    assert kept[2] < 0.51 * kept[1]
    assert kept[3] < 0.34 * kept[1]


@pytest.mark.parametrize(
    "method",
    [pytest.param(one, marks=exhaustive_unless(one == "diloco")) for one in ("local_sgd", "diloco")],
)
def test_the_example_with_local_steps_learns(method: str) -> None:
    pytest.importorskip("sklearn")
    finished = run(*hvdrun(2, sys.executable, LOCAL_STEPS, "--method", method))
    assert epochs(finished)[-1] >= 93
    found = re.search(r"([\d,]+) bytes were combined, by gradients it would be ([\d,]+)", finished.stdout)
    assert found is not None
    combined, by_gradients = (int(one.replace(",", "")) for one in found.groups())
    assert 0 < combined < 0.2 * by_gradients


def test_the_example_with_a_slow_rank_learns() -> None:
    """The slow rank takes fewer steps; the first number is the bound that staleness=3 sets."""
    pytest.importorskip("sklearn")
    finished = run(*hvdrun(3, sys.executable, STALE, "--updates", "200", "--slow", "0.05"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    steps = [
        int(one) for one in re.findall(r"steps of the ranks: \[(\d+), (\d+), (\d+)\]", finished.stdout)[0]
    ]
    assert 50 <= steps[2] < min(steps[:2])
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", finished.stdout)
    assert float(accuracy) >= 50  # of ten digits; how much 200 updates teach depends on their order


def test_the_example_with_a_deadline_learns() -> None:
    pytest.importorskip("sklearn")
    # More gradients come too late when more else runs: then it learns less in as many epochs.
    assert epochs(run(*hvdrun(3, sys.executable, DEADLINE)))[-1] >= 80


def test_the_example_with_overlap_prints_the_same_numbers_as_without() -> None:
    pytest.importorskip("sklearn")
    outputs = []
    for way in ("--overlap", "--no-overlap"):
        finished = run(*hvdrun(2, sys.executable, OVERLAPPED, way, "--epochs", "2"))
        assert finished.returncode == 0, finished.stdout + finished.stderr
        outputs.append(re.findall(r"epoch.*", finished.stdout))
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 2


def test_gradients_in_8_bits_learn() -> None:
    pytest.importorskip("sklearn")
    command = hvdrun(2, "--transport", "socket", sys.executable, COMPRESSED, "--compression", "int8")
    finished = run(*command)
    assert epochs(finished)[-1] >= 93
    assert "compressed" in finished.stdout


def test_the_digits_example_runs_alone() -> None:
    pytest.importorskip("sklearn")
    assert len(epochs(run("env", "OMP_NUM_THREADS=1", sys.executable, DIGITS, "--epochs", "2"))) == 2


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=exhaustive_unless(ranks == 4)) for ranks in (2, 4)]
)
def test_layers_that_are_cut_over_ranks_are_those_of_one_process(ranks: int) -> None:
    finished = run(*hvdrun(ranks, sys.executable, PARALLEL_LINEAR))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert len(re.findall(r"step +\d+: loss [\d.]+, off the uncut pair by [\de.+-]+", finished.stdout)) == 4
