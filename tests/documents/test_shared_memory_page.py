"""The programs of the page about tensors in shared memory run."""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import output_of, programs_of

pytest.importorskip("torch")

AT_PLACES = """
addresses = {parameter.grad.data_ptr() for parameter in model.parameters()}
model(torch.randn(32, 512)).square().mean().backward()
assert addresses == {parameter.grad.data_ptr() for parameter in model.parameters()}
print("KEPT")
"""


def test_arrays_are_summed(tmp_path: Path) -> None:
    program, _ = programs_of("shared_memory.md")
    assert output_of(program, 2, tmp_path).count("1.0") == 2


def test_gradients_keep_their_places(tmp_path: Path) -> None:
    _, program = programs_of("shared_memory.md")
    assert output_of(program + AT_PLACES, 2, tmp_path).count("KEPT") == 2
