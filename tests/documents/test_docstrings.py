"""Each public function and class has an example in its docstring, which runs on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from process_world import hvdrun, output_of

PACKAGES = ("numpy", "torch", "jax", "tensorflow", "keras")
PROGRAM = Path(__file__).with_name("run_examples.py")


@pytest.mark.parametrize("package", [*PACKAGES, "keras.callbacks"])
def test_examples_run(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package.partition(".")[0])
    output_of(*hvdrun(2, sys.executable, PROGRAM, package), cwd=tmp_path)


def test_the_example_of_jaxs_own_collectives_runs(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    output_of(*hvdrun(2, sys.executable, PROGRAM, "jax", "enable_collectives"), cwd=tmp_path)


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_of_elastic_jobs_run(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    output_of(*hvdrun(2, "--min-np", "2", sys.executable, PROGRAM, f"{package}.elastic"), cwd=tmp_path)
