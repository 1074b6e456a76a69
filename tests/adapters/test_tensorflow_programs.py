"""Whole programs with TensorFlow: a rank that dies, the example's learning, and unsupported cases."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, run

pytest.importorskip("tensorflow")

PROGRAMS = Path(__file__).with_name("programs_tensorflow.py")
ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "tensorflow_digits.py"
PAGE = ROOT / "docs" / "guide" / "tensorflow.md"
RUN_BLOCKS = ROOT / "tests" / "documents" / "run_blocks.py"


@pytest.mark.parametrize(("as_horovod", "error"), [("0", "AbortedError"), ("1", "UnknownError")])
def test_the_death_of_a_rank_comes_out_of_the_others_operations(
    tmp_path: Path, as_horovod: str, error: str
) -> None:
    command = sys.executable, PROGRAMS, "a_rank_that_dies", tmp_path
    finished = run(*hvdrun(2, *command, SIRTAKI_AS_HOROVOD=as_horovod))
    assert finished.returncode != 0
    for name in ("function", "eager"):
        text = (tmp_path / name).read_text()
        assert text.startswith(f"{error}: "), text
        assert "rank 1" in text, text


@pytest.mark.parametrize("setting", ["all", "contributors"])
def test_averages_of_slices_divide_as_those_of_dense_tensors(tmp_path: Path, setting: str) -> None:
    command = sys.executable, PROGRAMS, "averages_of_slices_after_a_join", tmp_path
    finished = run(*hvdrun(3, *command, SIRTAKI_JOIN_AVERAGE=setting))
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_rank_0_warns_that_operations_do_not_use_gpus(tmp_path: Path) -> None:
    finished = run(*hvdrun(2, sys.executable, PROGRAMS, "gpus_that_operations_do_not_use", tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stderr.count("operations between ranks run on the CPU") == 1
    assert "programs_tensorflow.py" in finished.stderr  # the line of the program that calls init()


@pytest.mark.parametrize("as_horovod", ["0", "1"])
def test_the_death_of_a_rank_ends_a_training_session(tmp_path: Path, as_horovod: str) -> None:
    command = sys.executable, PROGRAMS, "a_rank_that_dies_in_a_training_session", tmp_path
    finished = run(*hvdrun(2, *command, SIRTAKI_AS_HOROVOD=as_horovod))
    assert finished.returncode != 0
    assert "rank 1" in (tmp_path / "session").read_text()


def test_sessions_without_tensorflow_2(tmp_path: Path) -> None:
    finished = run(*hvdrun(2, sys.executable, PROGRAMS, "sessions_without_tensorflow_2", tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("ran 9 cases") == 2


def test_the_digits_example_learns() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("keras", minversion="3")
    finished = run(*hvdrun(2, sys.executable, DIGITS, "--epochs", "3"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    reports = re.findall(r"epoch +(\d+): loss [\d.]+, test accuracy ([\d.]+)%", finished.stdout)
    assert [int(epoch) for epoch, _ in reports] == list(range(1, 4))
    assert float(reports[-1][1]) >= 90


def test_the_code_of_the_page_runs() -> None:
    finished = run(*hvdrun(2, sys.executable, RUN_BLOCKS, PAGE))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("ran 2 blocks") == 2
