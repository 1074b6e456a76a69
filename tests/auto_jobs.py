"""Shared helpers of tests that run scripts with hvdrun --auto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launching import FAILSAFE_SECONDS

# Stands in for the part that splits trainings, so that scripts without a training end well.
SPLITTING_PART = """
import sys, types
part = types.ModuleType("sirtaki.keras.auto")
part.install = lambda: None
part.has_split = lambda: True
sys.modules["sirtaki.keras.auto"] = sys.modules["sirtaki.torch.auto"] = part
"""


def lines_of(result: subprocess.CompletedProcess[str], rank: int) -> list[str]:
    return [one.partition("] ")[2] for one in result.stdout.splitlines() if one.startswith(f"[{rank}] ")]


def plain(folder: Path, environment: dict[str, str], *arguments: str) -> list[str]:
    """Returns the output of Python itself."""
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FAILSAFE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()
