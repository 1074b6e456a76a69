"""Programs of the pages, run as their readers run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from process_world import PATIENCE, hvdrun

DOCS = Path(__file__).parents[2] / "docs"
FITS = """
hvd.check_parameters(model.state_dict())
assert (model.weight - 1).abs().max() < 0.1, model.weight
print("FITS")
"""  # for the end of a program that learns weights of 1
_PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def path_of(page: str) -> Path:
    """Returns where a page is: each name occurs once in the folders of docs/."""
    (path,) = DOCS.rglob(page)
    return path


def programs_of(page: str) -> list[str]:
    """Returns the Python blocks of a page."""
    return _PROGRAM.findall(path_of(page).read_text())


def output_of(program: str, ranks: int, folder: Path) -> str:
    """Returns what hvdrun prints for a program, which must succeed and give no warning."""
    script = folder / "train.py"
    script.write_text(program)
    command = hvdrun(ranks, sys.executable, "-W", "error::UserWarning", script)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
