"""The elastic examples on real data: each learns, although its rank 0 is killed during the training."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic.running import FAILSAFE_SECONDS, QUICK
from elastic.schedules import workers_of
from launching import HVDRUN, wait_until
from tiers import exhaustive_unless

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS = 6
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


def output_after_a_loss(example: str, output: Path, **environment: str) -> str:
    """Runs an example on three ranks, kills rank 0 after the first epoch, and returns the output."""
    script = str(EXAMPLES / f"elastic_{example}_digits.py")
    options = ("-np", "3", "--min-np", "1", *QUICK)
    with output.open("w") as file:
        job = subprocess.Popen(
            [*HVDRUN, *options, sys.executable, script, "--epochs", str(EPOCHS)],
            env={**os.environ, **QUIET, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: "epoch  1:" in output.read_text() or job.poll() is not None, "the first epoch has ended"
        )
        assert job.poll() is None, output.read_text()
        os.kill(workers_of(job)[0], signal.SIGKILL)
        job.wait(FAILSAFE_SECONDS)
    finally:
        job.kill()
    text = output.read_text()
    assert job.returncode == 0, text
    return text


def check_learning(text: str) -> None:
    """Checks that the loss was reported, that no epoch is missing, and the accuracy after the last."""
    assert "rank 0 was lost: killed by signal 9" in text
    assert "2 ranks from commit" in text
    found = re.findall(r"epoch +(\d+): test accuracy ([\d.]+)% on (\d) rank", text)
    epochs = [int(epoch) for epoch, _, _ in found]
    assert epochs == sorted(epochs), text
    assert set(epochs) == set(range(1, EPOCHS + 1)), text
    assert float(found[-1][1]) >= 90, text
    # A rank that is killed between its report and the commit leaves the report to another rank.
    assert len(epochs) <= EPOCHS + 1, text


def test_the_example_with_torch_survives_a_loss(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    check_learning(output_after_a_loss("pytorch", tmp_path / "output"))


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(one, marks=exhaustive_unless(one == "tensorflow"))
        for one in ("tensorflow", "torch", "jax")
    ],
)
def test_the_example_with_keras_survives_a_loss(backend: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    for module in ("keras", backend):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"there is no {module} here")
    check_learning(output_after_a_loss("keras", tmp_path / "output", KERAS_BACKEND=backend))


def test_the_example_with_jax_survives_a_loss(tmp_path: Path) -> None:
    for module in ("sklearn", "flax", "optax"):
        pytest.importorskip(module)
    check_learning(output_after_a_loss("jax", tmp_path / "output"))
