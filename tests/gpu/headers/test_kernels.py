"""NVIDIA's assembler, which is part of drivers, too, accepts the core's kernels for all generations of GPUs.

CUDA, triton and `pip install '.[gpu-headers]'` bring it. The versions 12.9 and 13.5 accepted the kernels on
2026-11-30.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[2] / "core"
PROGRAM = "bin/ptxas"
PLACES = ("nvidia/cuda_nvcc", "nvidia/cu13", "triton/backends/nvidia")  # of packages
GENERATIONS = (52, 60, 70, 75, 80, 86, 89, 90, 100, 120)  # of which an assembler knows some


@pytest.fixture(scope="module")
def assembler() -> str:
    found = [str(Path(entry, place, PROGRAM)) for entry in sys.path for place in PLACES]
    for program in (*found, "ptxas", *map(str, sorted(Path("/usr/local").glob(f"cuda*/{PROGRAM}")))):
        if path := shutil.which(program):
            return path
    pytest.skip("there is no ptxas here; pip install '.[gpu-headers]' brings it")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = tmp_path_factory.mktemp("kernels") / "print_kernels"
    sources = (HERE / "print_kernels.cc", CORE / "gpu" / "device" / "kernel_text.cc")
    subprocess.run(["c++", "-std=c++20", f"-I{CORE}", *sources, "-o", program], check=True, timeout=300)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def assemble(assembler: str, generation: int, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = folder / "kernels.ptx"
    source.write_text(text)
    target = folder / "kernels.cubin"
    command = [assembler, "--warning-as-error", f"--gpu-name=sm_{generation}", source, "-o", target]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_kernels_are_assembled_for_all_gpus(assembler: str, kernels: str, tmp_path: Path) -> None:
    served = subprocess.run([assembler, "--help"], capture_output=True, text=True, check=True).stdout
    own = [generation for generation in GENERATIONS if re.search(rf"'sm_{generation}'", served)]
    assert len(own) >= 5
    for generation in own:
        assembled = assemble(assembler, generation, kernels, tmp_path)
        assert assembled.returncode == 0, assembled.stdout + assembled.stderr


def test_a_mistake_is_noticed(assembler: str, kernels: str, tmp_path: Path) -> None:
    wrong = kernels.replace("shl.b32 %bits", "shl.b32 %unit", 1)
    assert assemble(assembler, 90, wrong, tmp_path).returncode != 0
