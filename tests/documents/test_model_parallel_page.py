"""The program of the page about model parallelism runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import output_of, path_of, programs_of

pytest.importorskip("torch")

PAGE = "model_parallel.md"
LINE = re.compile(r"rank (\d): loss ([\d.]+), (\d+) weights of the first layer")


@pytest.mark.parametrize(("ranks", "weights"), [(1, 16_384), (2, 8192)])
def test_the_page(ranks: int, weights: int, tmp_path: Path) -> None:
    (program,) = programs_of(PAGE)
    found = LINE.findall(output_of(program, ranks, tmp_path))
    assert sorted(int(rank) for rank, _, _ in found) == list(range(ranks))
    assert len({loss for _, loss, _ in found}) == 1
    assert {int(count) for _, _, count in found} == {weights}
    assert f"{weights:,}" in path_of(PAGE).read_text()
