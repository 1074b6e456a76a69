"""The program at the beginning of the page about overlap_forward runs, and its weights fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import FITS, output_of, programs_of

pytest.importorskip("torch")


def test_the_page_begins_with_a_program(tmp_path: Path) -> None:
    (program,) = programs_of("overlap.md")
    assert output_of(program + FITS, 2, tmp_path).count("FITS") == 2
