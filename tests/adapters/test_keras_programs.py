"""Whole programs with Keras: the example's learning on each backend, and reading its saved models."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, output_of, run
from tiers import exhaustive_unless

pytest.importorskip("keras")
pytest.importorskip("sklearn")

import sirtaki.keras as hvd  # imports keras

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "keras_digits.py"
PAGE = ROOT / "docs" / "guide" / "keras.md"
RUN_BLOCKS = ROOT / "tests" / "documents" / "run_blocks.py"
LOAD = """
import sys
sys.modules["sirtaki"] = None  # as if it were not installed
import keras
model = keras.models.load_model(sys.argv[1])
print(type(model.optimizer).__name__, int(model.optimizer.iterations))
"""

RAISES_ON_RANK_1 = """
import keras
import numpy as np
import sirtaki.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
def end_batch(batch, logs):
    if hvd.rank() == 1 and batch == 2:
        raise RuntimeError("mine")
raising = keras.callbacks.LambdaCallback(on_train_batch_end=end_batch)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), raising]
model.fit(np.ones((20, 3)), np.ones((20, 1)), batch_size=2, verbose=0, callbacks=callbacks)
"""


OWN_GPU = """
import sirtaki.keras as hvd
from jax._src.xla_bridge import CUDA_VISIBLE_DEVICES
hvd.init()
print(f"rank {hvd.rank()}: {CUDA_VISIBLE_DEVICES.value}")
"""


def test_each_rank_has_its_own_gpu_on_jax() -> None:
    environment = {"KERAS_BACKEND": "jax", "CUDA_VISIBLE_DEVICES": "4,7"}
    printed = output_of(*hvdrun(2, sys.executable, "-c", OWN_GPU, **environment))
    assert sorted(re.findall(r"rank \d: \w+", printed)) == ["rank 0: 0", "rank 1: 1"]


@pytest.mark.parametrize(
    "backend",
    [pytest.param(one, marks=exhaustive_unless(one == "torch")) for one in ("tensorflow", "torch", "jax")],
)
def test_the_digits_example_learns(backend: str, tmp_path: Path) -> None:
    """The saved model is loaded without sirtaki."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"there is no {backend} here")
    saved = tmp_path / "best.keras"
    environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    text = output_of(*hvdrun(2, sys.executable, DIGITS, "--epochs", "4", "--save", saved, **environment))
    reports = re.findall(r"epoch +(\d+): loss [\d.]+, test accuracy ([\d.]+)%", text)
    assert [int(epoch) for epoch, _ in reports] == list(range(1, 5))
    assert float(reports[-1][1]) >= 90
    assert saved.exists()
    if backend == "torch":  # one backend is enough
        # As if sirtaki were not installed: torch looks for its entry point.
        absent = ("KERAS_BACKEND=torch", "TORCH_DEVICE_BACKEND_AUTOLOAD=0")
        loaded = output_of("env", *absent, sys.executable, "-c", LOAD, saved)
        assert re.fullmatch(r"Adam \d+", loaded.strip())


def test_an_exception_of_one_rank_is_the_one_that_is_reported() -> None:
    """On JAX, `fit` ends its optimizer although a callback has raised: the rank has not ended by itself."""
    pytest.importorskip("jax")
    environment = {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3"}
    finished = run(*hvdrun(2, sys.executable, "-c", RAISES_ON_RANK_1, **environment))
    output = finished.stdout + finished.stderr
    assert finished.returncode, output
    assert "RuntimeError: mine" in output
    assert "has ended its training" not in output
    assert re.search(r"hvdrun: .*RuntimeError: mine", output), output


def test_the_code_of_the_page_runs() -> None:
    text = output_of(*hvdrun(2, sys.executable, RUN_BLOCKS, PAGE, KERAS_BACKEND="torch"))
    assert text.count("ran 1 blocks") == 2
    names = set(re.findall(r"\bhvd\.((?:[A-Za-z_]\w*\.?)+)", PAGE.read_text()))
    assert {name.split(".")[0] for name in names} <= set(hvd.__all__)
