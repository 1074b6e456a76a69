"""The code of the page about torch.distributed runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, hvdrun

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "torch_distributed.md"
RUN_BLOCKS = Path(__file__).with_name("run_blocks.py")


def test_the_page() -> None:
    command = hvdrun(2, sys.executable, RUN_BLOCKS, PAGE)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ran 1 blocks") == 2
    assert "rank 1 of 2: " in done.stdout
