"""The core's own tests: each case of each executable, as `make test` or another target builds them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("CORE_TESTS", Path(__file__).parents[2] / "build" / "core"))


def _emulator() -> list[str]:
    """Returns the start of a command that runs the executables, if they are for another processor."""
    cache = FOLDER / "CMakeCache.txt"
    variables = cache.read_text() if cache.exists() else ""
    found = re.search(r"^CMAKE_CROSSCOMPILING_EMULATOR:\w+=(.+)$", variables, re.MULTILINE)
    return found[1].split(";") if found else []


PROGRAMS = sorted({FOLDER / f"test_{path.parent.name}" for path in Path(__file__).parent.glob("*/*.cc")})
EMULATOR = _emulator()
PATIENCE = 900.0 if EMULATOR else 300.0  # seconds: far beyond anything that works


def cases() -> list[tuple[Path, str]]:
    found = []
    for executable in filter(Path.exists, PROGRAMS):
        listed = subprocess.run([*EMULATOR, executable, "--list"], capture_output=True, text=True, check=True)
        found += [(executable, name) for name in listed.stdout.split()]
    return found


@pytest.mark.parametrize(
    ("executable", "name"),
    [pytest.param(executable, name, id=f"{executable.name}-{name}") for executable, name in cases()],
)
def test_case(executable: Path, name: str) -> None:
    ended = subprocess.run([*EMULATOR, executable, name], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_cases_are_built() -> None:
    if not FOLDER.is_dir():
        pytest.skip("the core's tests are not built here; make test builds them")
    assert cases()
