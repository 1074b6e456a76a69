"""The elastic examples on real data: each learns, although its rank 0 is killed during the training."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from elastic.running import QUICK, running_job
from elastic.schedules import workers_of
from launching import HVDRUN
from tiers import exhaustive_unless

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS = 6
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


def output_after_a_loss(example: str, folder: Path, **environment: str) -> str:
    """Runs an example on three ranks, kills rank 0 after the first epoch, and returns the output."""
    script = str(EXAMPLES / f"elastic_{example}_digits.py")
    options = ("-np", "3", "--min-np", "1", *QUICK)
    line = [*HVDRUN, *options, sys.executable, script, "--epochs", str(EPOCHS)]
    with running_job(folder, line, **QUIET, **environment) as job:
        job.says("epoch  1:")
        os.kill(workers_of(job.process)[0], signal.SIGKILL)
        ended = job.ended()
    assert ended.code == 0, ended.text
    return ended.text


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
    check_learning(output_after_a_loss("pytorch", tmp_path))


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
    check_learning(output_after_a_loss("keras", tmp_path, KERAS_BACKEND=backend))


def test_the_example_with_jax_survives_a_loss(tmp_path: Path) -> None:
    for module in ("sklearn", "flax", "optax"):
        pytest.importorskip(module)
    check_learning(output_after_a_loss("jax", tmp_path))
