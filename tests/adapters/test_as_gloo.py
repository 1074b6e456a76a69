"""The name gloo, which means sirtaki with hvdrun --as-gloo or SIRTAKI_AS."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, run

pytest.importorskip("torch")

PROGRAM = Path(__file__).with_name("programs_as_gloo.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def with_one_thread(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return run(*command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


@pytest.mark.parametrize("launcher", ["hvdrun", "torchrun"])
def test_every_name_of_gloo_means_sirtaki(launcher: str, tmp_path: Path) -> None:
    program = [str(PROGRAM), "calls", str(tmp_path)]
    if launcher == "hvdrun":
        ended = with_one_thread([*hvdrun(2, "--as-gloo", sys.executable), *program])
    else:
        ended = with_one_thread([*TORCHRUN, *program], SIRTAKI_AS="gloo")
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert output.count("is done") == 2
    assert output.count('"gloo" means sirtaki') == 1


def test_another_name_is_refused() -> None:
    failed = with_one_thread([sys.executable, "-c", "import torch"], SIRTAKI_AS="nccl")
    assert failed.returncode != 0
    assert "sirtaki can only stand for gloo" in failed.stderr
