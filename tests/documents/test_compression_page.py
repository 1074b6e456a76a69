"""The program at the beginning of the page about compressed gradients runs, and compresses."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .pages import output_of, programs_of

pytest.importorskip("torch")


def test_the_page_begins_with_a_program(tmp_path: Path) -> None:
    (program,) = programs_of("compression.md")
    output = output_of(program, 2, tmp_path)
    counted = [ast.literal_eval(text) for text in re.findall(r"\{.*\}", output)]
    assert [one["exchanges"] for one in counted] == [20, 20]  # 10 of 30 are exact
    assert all(0 < one["sent_bytes"] < 0.2 * one["exact_bytes"] for one in counted)
