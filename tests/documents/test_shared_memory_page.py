"""The program of the page about arrays in shared memory runs; test_torch_pages.py runs the other one."""

from __future__ import annotations

from pathlib import Path

from .pages import output_of, programs_of


def test_arrays_are_summed(tmp_path: Path) -> None:
    program, _ = programs_of("shared_memory.md")
    assert output_of(program, 2, tmp_path).count("1.0") == 2
