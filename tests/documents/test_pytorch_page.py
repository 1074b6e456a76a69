"""The code of the pages about PyTorch and its data runs, learns, and resumes after an interruption."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from process_world import hvdrun, output_of

from .pages import path_of

pytest.importorskip("torch")

PAGES = path_of("pytorch.md"), path_of("unequal_data.md")
RUN_BLOCKS = Path(__file__).with_name("run_blocks.py")


def test_the_code_learns_and_resumes(tmp_path: Path) -> None:
    command = hvdrun(3, sys.executable, "-W", "error::UserWarning", RUN_BLOCKS, *PAGES)

    def run() -> str:
        output = output_of(*command, cwd=tmp_path)
        for page in PAGES:
            blocks = page.read_text().count("```python")
            assert output.count(f"{page.name}: ran {blocks} blocks") == 3
        return output

    first = run()
    assert first.count("% of 200 right") == 3  # one rank prints, once per epoch; 3 ranks have 67, 67 and 66
    assert "epoch 3: 9" in first
    assert "right" not in run()  # the checkpoint records that training is complete
