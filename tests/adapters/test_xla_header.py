"""A check of our declarations of XLA's foreign function interface against the installed jaxlib's header."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")

COMPARISON = Path(__file__).with_name("xla_header") / "compare.cc"
ROOT = Path(__file__).parents[2]
BINDINGS = ROOT / "bindings"


def compare(bindings: Path, program: Path) -> subprocess.CompletedProcess[str]:
    """Compiles the comparison with the declarations below a folder."""
    folders = (bindings, BINDINGS, ROOT / "core" / "include", jax.ffi.include_dir())
    command = ["c++", "-std=c++20", "-Wno-invalid-offsetof", *(f"-I{folder}" for folder in folders)]
    return subprocess.run(
        [*command, COMPARISON, "-o", program], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.skipif(shutil.which("c++") is None, reason="comparing needs a compiler")
def test_declarations_are_those_of_the_header(tmp_path: Path) -> None:
    compiled = compare(BINDINGS, tmp_path / "compare")
    assert compiled.returncode == 0, compiled.stderr
    said = subprocess.run([tmp_path / "compare"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"0\.\d+\n", said)


@pytest.mark.skipif(shutil.which("c++") is None, reason="comparing needs a compiler")
def test_a_wrong_declaration_is_noticed(tmp_path: Path) -> None:
    ours = (BINDINGS / "xla" / "ffi.h").read_text()
    (tmp_path / "xla").mkdir()
    (tmp_path / "xla" / "ffi.h").write_text(
        ours.replace("void* not_used_either[8]", "void* not_used_either[7]")
    )
    assert "XLA_FFI_Future_Create" in compare(tmp_path, tmp_path / "compare").stderr
