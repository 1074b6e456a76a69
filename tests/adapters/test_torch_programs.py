"""Whole programs with torch: imported modules, the example's learning, forks, errors and Ctrl-C."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, hvdrun

pytest.importorskip("torch")

PROGRAMS = Path(__file__).with_name("programs_torch.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "pytorch_digits.py"
PARALLEL_LINEAR = EXAMPLES / "pytorch_parallel_linear.py"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], text=True, capture_output=True, timeout=PATIENCE, check=False
    )


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


@pytest.mark.parametrize("program", ["loader_workers", "interrupted_wait", "beside_ddp", "old_optimizers"])
def test_program(program: str, tmp_path: Path) -> None:
    finished = run(*hvdrun(2, sys.executable, PROGRAMS, program, tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("is done") == 2


@pytest.mark.full
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


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_digits_example_learns(ranks: int) -> None:
    pytest.importorskip("sklearn")
    assert epochs(run(*hvdrun(ranks, sys.executable, DIGITS)))[-1] >= 97


@pytest.mark.full
def test_the_digits_example_runs_alone() -> None:
    pytest.importorskip("sklearn")
    assert len(epochs(run("env", "OMP_NUM_THREADS=1", sys.executable, DIGITS, "--epochs", "2"))) == 2


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_that_are_cut_over_ranks_are_those_of_one_process(ranks: int) -> None:
    finished = run(*hvdrun(ranks, sys.executable, PARALLEL_LINEAR))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert len(re.findall(r"step +\d+: loss [\d.]+, off the uncut pair by [\de.+-]+", finished.stdout)) == 4
