"""Our declarations of CUDA's and NCCL's functions against the real headers, needed for nothing else.

`pip install '.[gpu-headers]'` brings them. All fit on 2026-11-30: CUDA 12.9 and 13.0, NCCL 2.19.3 and 2.32.3.
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
PACKAGES = ("cuda_runtime", "cu13", "nccl")  # NVIDIA's, for CUDA 12 and 13
FOLDERS = (
    *(Path(entry, "nvidia", name, "include") for entry in sys.path for name in PACKAGES),
    *sorted(Path("/usr/local").glob("cuda*/include")),
    Path("/usr/include"),
)


def find(header: str) -> Path:
    for folder in FOLDERS:
        if (folder / header).is_file():
            return folder
    pytest.skip(f"there is no {header} here; pip install '.[gpu-headers]' brings it")


def compare(core: Path, program: Path) -> subprocess.CompletedProcess[str]:
    """Compiles the comparison with the declarations below a folder; further headers are the core's."""
    folders = [core, CORE, HERE.parents[1], HERE / "stand_in", find("cuda.h"), find("nccl.h")]
    command = ["c++", "-std=c++20", "-Wall", *(f"-I{folder}" for folder in folders)]
    return subprocess.run(
        [*command, HERE / "compare.cc", "-o", program], capture_output=True, text=True, timeout=300
    )


def test_declarations_are_those_of_the_headers(tmp_path: Path) -> None:
    compiled = compare(CORE, tmp_path / "compare")
    assert compiled.returncode == 0, compiled.stderr
    said = subprocess.run([tmp_path / "compare"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"CUDA \d+, NCCL \d+\n", said)


@pytest.mark.parametrize(
    ("header", "right", "wrong", "complaint"),
    [
        ("cuda.h", ", int priority", "", "cuStreamCreateWithPriority is declared differently"),
        ("nccl.h", "NcclUniqueId, int rank", "NcclUniqueId, long rank", "ncclCommInitRankConfig"),
        ("nccl.h", "unsigned version", "long version", "offsetof"),
        ("cuda.h", "size_t* failed, ", "", "cuMemcpyBatchAsync is declared differently"),
        ("cuda.h", "unsigned flags = 0", "size_t flags = 0", "sizeof"),
        ("cuda.h", "cuda_not_ready = 600", "cuda_not_ready = 601", "CUDA_ERROR_NOT_READY"),
    ],
)
def test_a_wrong_declaration_is_noticed(
    header: str, right: str, wrong: str, complaint: str, tmp_path: Path
) -> None:
    shutil.copytree(CORE / "gpu", tmp_path / "gpu")
    declarations = tmp_path / "gpu" / "libraries" / header
    text = declarations.read_text()
    assert text.count(right) == 1
    declarations.write_text(text.replace(right, wrong))
    compiled = compare(tmp_path, tmp_path / "compare")
    assert compiled.returncode != 0
    assert complaint in compiled.stderr
