"""The library's system requirements equal those that the project states, everywhere it states them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from install import floor

from sirtaki.bindings import library

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["libsirtaki.so", *(f"libsirtaki_{name}.so" for name in ("mpi", "tensorflow", "xla"))]
)
def test_a_library_asks_for_no_more_than_is_stated(name: str) -> None:
    with library.PATH.with_name(name).open("rb") as built:
        found = floor.wanted(built)
    assert found["GLIBC"] > (2,)  # the version was read
    assert floor.complaints(found, floor.stated()) == []


@pytest.mark.parametrize(
    ("found", "allowed", "complaint"),
    [
        ({"GLIBC": (2, 34)}, {"GLIBC": (2, 34)}, None),
        ({"GLIBC": (2, 9)}, {"GLIBC": (2, 34)}, None),  # compared as numbers, not as text
        ({"GLIBC": (2, 36)}, {"GLIBC": (2, 34)}, "needs GLIBC 2.36, but is to run from 2.34 on"),
        ({"GLIBCXX": (3, 4, 30)}, {"GLIBC": (2, 34)}, "needs GLIBCXX 3.4.30, of which"),
    ],
)
def test_a_version_that_is_too_new_is_named(
    found: dict[str, floor.Version], allowed: dict[str, floor.Version], complaint: str | None
) -> None:
    lines = floor.complaints(found, allowed)
    assert len(lines) == (complaint is not None)
    assert complaint is None or complaint in lines[0]


def test_the_program_fails_for_an_older_system() -> None:
    program = [sys.executable, ROOT / "tests" / "install" / "floor.py", library.PATH]
    assert subprocess.run(program, capture_output=True).returncode == 0
    failed = subprocess.run([*program, "--glibc", "2.5"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert "is to run from 2.5 on" in failed.stderr


def test_the_first_page_states_the_same_floor() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"glibc {floor.show(floor.stated()['GLIBC'])}" in text
    oldest = floor.table("project", "optional-dependencies")["torch"][0].partition(">=")[2]
    assert f"torch {oldest} and newer" in text
