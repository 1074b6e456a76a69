"""The programs of the page about local SGD for JAX and Keras run, and end with equal parameters that fit.

The one for torch runs in test_torch_pages.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tiers import exhaustive_unless

from .pages import output_of, programs_of

WEIGHTS = """
import numpy as np
found = hvd.allgather_object(np.asarray(WEIGHTS).tobytes())
assert len(set(found)) == 1, "ranks differ"
assert abs(np.asarray(WEIGHTS) - 1).max() < 0.1, WEIGHTS
print("FITS")
"""


def test_the_program_for_jax_runs(tmp_path: Path) -> None:
    if importlib.util.find_spec("optax") is None:
        pytest.skip("optax is not installed")
    program = programs_of("local_sgd.md")[1] + WEIGHTS.replace("WEIGHTS", 'params["w"]')
    assert output_of(program, 2, tmp_path).count("FITS") == 2


@pytest.mark.parametrize(
    "backend",
    [pytest.param(one, marks=exhaustive_unless(one == "torch")) for one in ("jax", "tensorflow", "torch")],
)
def test_the_program_for_keras_runs(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("keras") is None or importlib.util.find_spec(backend) is None:
        pytest.skip(f"keras or {backend} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    program = programs_of("local_sgd.md")[2] + WEIGHTS.replace("WEIGHTS", "model.get_weights()[0]")
    assert output_of(program, 2, tmp_path).count("FITS") == 2
