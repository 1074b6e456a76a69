"""The program at the beginning of the page about sirtaki.run prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from process_world import PATIENCE

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "run.md"
PROGRAM_AND_OUTPUT = re.compile(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page(tmp_path: Path) -> None:
    ((program, output),) = PROGRAM_AND_OUTPUT.findall(PAGE.read_text())
    script = tmp_path / "script.py"
    script.write_text(program)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *of_ranks, results = done.stdout.splitlines()
    assert [*sorted(of_ranks), results] == output.splitlines()
