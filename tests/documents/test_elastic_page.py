"""The code of the page on elastic training runs, on two ranks that may be lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "elastic.md"
RUN_BLOCKS = Path(__file__).with_name("run_blocks.py")


def test_the_code_of_the_page_runs() -> None:
    command = [sys.executable, "-m", "sirtaki.runner", "-np", "2", "--min-np", "1"]
    command += [sys.executable, "-W", "error::UserWarning", str(RUN_BLOCKS), str(PAGE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"ran {PAGE.read_text().count('```python')} blocks") == 2
