"""Whole programs with JAX: imported modules, the example's learning, lost ranks, the page's code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, run

for package in ("jax", "optax", "flax"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "jax.md"
PROGRAMS = Path(__file__).with_name("programs_jax.py")
DIGITS = ROOT / "examples" / "jax_digits.py"
TWO_DEVICES = "XLA_FLAGS=--xla_force_host_platform_device_count=2"


def test_jax_is_not_imported_before_it_is_asked_for() -> None:
    finished = run(sys.executable, "-c", "import sys, sirtaki.numpy; assert 'jax' not in sys.modules")
    assert finished.returncode == 0, finished.stderr
    code = "import sys, sirtaki.jax; assert not {'optax', 'flax', 'torch'} & set(sys.modules)"
    finished = run(sys.executable, "-c", code)
    assert finished.returncode == 0, finished.stderr


def test_a_lost_rank_fails_the_others_programs(tmp_path: Path) -> None:
    finished = run(*hvdrun(2, sys.executable, PROGRAMS, "lost_rank", tmp_path))
    assert finished.returncode == 137
    assert re.match(r"hvdrun: rank 1 \(pid \d+\) was killed by signal 9", finished.stderr.splitlines()[-1])
    assert "programs_jax.py" in finished.stderr.split("what each rank was doing")[1]
    seen = (tmp_path / "seen").read_text()
    assert seen.startswith("ABORTED: ")
    assert "rank 1" in seen


def test_the_profiler_shows_operations(tmp_path: Path) -> None:
    finished = run(sys.executable, PROGRAMS, "profiled", tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_several_devices_are_refused(tmp_path: Path) -> None:
    finished = run("env", TWO_DEVICES, sys.executable, PROGRAMS, "several_devices", tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_each_rank_has_its_own_gpu(tmp_path: Path) -> None:
    command = hvdrun(2, sys.executable, PROGRAMS, "own_gpu", tmp_path, CUDA_VISIBLE_DEVICES="4,7,8")
    finished = run(*command)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "GPU(s)" not in finished.stderr
    crowded = run(*hvdrun(3, sys.executable, PROGRAMS, "crowded_gpus", tmp_path, CUDA_VISIBLE_DEVICES="4,7"))
    assert crowded.returncode == 0, crowded.stdout + crowded.stderr
    assert crowded.stderr.count("3 ranks of this job run on one host, which has 2 GPU(s)") == 1


def test_the_digits_example_learns() -> None:
    pytest.importorskip("sklearn")
    finished = run(*hvdrun(2, sys.executable, DIGITS, "--epochs", "4"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    reports = re.findall(r"epoch +\d+: loss [\d.]+, test accuracy ([\d.]+)%", finished.stdout)
    assert len(reports) == 4
    assert float(reports[-1]) >= 92


def test_the_page_runs() -> None:
    finished = run(*hvdrun(2, sys.executable, ROOT / "tests" / "documents" / "run_blocks.py", PAGE))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("ran 1 blocks") == 2
