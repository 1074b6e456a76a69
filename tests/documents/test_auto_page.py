"""The page about hvdrun --auto begins with a script that knows nothing of sirtaki."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, hvdrun

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "auto.md"


def test_the_page_begins_with_a_script_for_one_device(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "sirtaki" not in programs[0]
    assert "hvd" not in programs[0]
    script = tmp_path / "train.py"
    script.write_text(programs[0])
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        hvdrun(2, "--auto", sys.executable, str(script)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # nothing split is a failure
