"""The program at the beginning of the page about divided state runs, and divides it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .pages import output_of, programs_of

torch = pytest.importorskip("torch")


def test_the_page_begins_with_a_program(tmp_path: Path) -> None:
    (program,) = programs_of("sharding.md")
    output = output_of(program, 2, tmp_path)
    kept = [int(count) for count in re.findall(r"^\[\d\] (\d+)$", output, re.MULTILINE)]
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(saved)
    assert all(int(values["step"]) == 30 for values in plain.state.values())
    whole = sum(tensor.numel() for values in plain.state.values() for tensor in values.values())
    counters = 3  # three parameters are cut, so that both ranks count their steps
    assert sum(kept) == whole + counters
    assert max(kept) < 0.51 * whole
