"""Whole programs with Keras: what the example learns on each backend, and who can read what it saves."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import PATIENCE, hvdrun

pytest.importorskip("keras")
pytest.importorskip("sklearn")

DIGITS = Path(__file__).parents[2] / "examples" / "keras" / "digits.py"
LOAD = """
import sys
sys.modules["sirtaki"] = None  # as if it were not installed
import keras
model = keras.models.load_model(sys.argv[1])
print(type(model.optimizer).__name__, int(model.optimizer.iterations))
"""


def run(*command: str | Path) -> str:
    finished = subprocess.run(
        [str(part) for part in command], text=True, capture_output=True, timeout=PATIENCE, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_the_digits_example_learns(backend: str, tmp_path: Path) -> None:
    """And what it saves is loaded where there is no sirtaki."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"there is no {backend} here")
    saved = tmp_path / "best.keras"
    environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    text = run(*hvdrun(2, sys.executable, DIGITS, "--epochs", "6", "--save", saved, **environment))
    reports = re.findall(r"epoch +(\d+): loss [\d.]+, test accuracy ([\d.]+)%", text)
    assert [int(epoch) for epoch, _ in reports] == list(range(1, 7))
    assert float(reports[-1][1]) >= 95
    assert saved.exists()
    if backend == "torch":
        loaded = run("env", "KERAS_BACKEND=torch", sys.executable, "-c", LOAD, saved)
        assert re.fullmatch(r"Adam \d+", loaded.strip())
