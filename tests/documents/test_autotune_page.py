"""The first program of the page about autotune runs, and the page names all settings that are tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from sirtaki.common.autotune.model import TUNED

from .pages import FITS, output_of, path_of, programs_of

pytest.importorskip("torch")


def test_the_page_begins_with_a_program(tmp_path: Path) -> None:
    (program,) = programs_of("autotune.md")
    assert output_of(program + FITS, 2, tmp_path).count("FITS") == 2


def test_the_page_lists_the_settings() -> None:
    table = path_of("autotune.md").read_text().partition("## What is tried")[2].partition("\n## ")[0]
    assert {f"--{name.replace('_', '-')}" for name in TUNED} == {
        line.split("`")[1] for line in table.splitlines() if line.startswith("| `--")
    }
