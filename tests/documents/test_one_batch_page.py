"""The programs of the page about one batch for all ranks print what it says, on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import output_of, path_of

PAGE = path_of("one_batch.md")
PROGRAMS = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
FRAMEWORK = re.compile(r"sirtaki\.(\w+) as hvd")


@pytest.mark.parametrize(
    ("index", "ranks"),
    [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 2)],
)
def test_a_program_of_the_page(index: int, ranks: int, tmp_path: Path) -> None:
    program, output = PROGRAMS.findall(PAGE.read_text())[index]
    framework = FRAMEWORK.search(program)
    assert framework is not None
    pytest.importorskip({"torch": "torch", "jax": "optax"}[framework[1]])
    lines = output_of(program, ranks, tmp_path).splitlines()
    assert [line.removeprefix("[0] ") for line in lines] == output.splitlines()


def test_the_page_begins_with_a_program() -> None:
    assert len(PROGRAMS.findall(PAGE.read_text())) == 3
