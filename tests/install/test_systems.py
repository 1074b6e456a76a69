"""The installation on systems that are not Linux."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_refused_with_a_reason(system: str) -> None:
    # setuptools itself is imported for the real system.
    imports = "import runpy, sys, setuptools.command.bdist_wheel, setuptools.command.build"
    source = f"sys.platform = {system!r}; sys.argv = ['setup.py', 'build']; runpy.run_path('setup.py')"
    command = [sys.executable, "-c", f"{imports}; {source}"]
    failed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60, check=False)
    assert failed.returncode == 1
    assert f"sirtaki runs on Linux only, and this is {system}" in failed.stderr
    assert "WSL 2" in failed.stderr
