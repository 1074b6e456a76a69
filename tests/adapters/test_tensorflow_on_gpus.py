"""TensorFlow's tensors on GPUs of the fakes, which a plugin gives its CPU build."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_gpu import FOLDER, needs_fake
from process_world import hvdrun, output_of, run

tf = pytest.importorskip("tensorflow")

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("programs_tensorflow_on_gpus.py")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds a device for TensorFlow."""
    built = tmp_path_factory.mktemp("plugin") / "plugin.so"
    framework = tf.sysconfig.get_lib()
    output_of(
        *("c++", "-std=c++20", "-shared", "-fPIC", "-Wall", "-Werror"),
        *(f"-I{ROOT / 'core'}", f"-I{tf.sysconfig.get_include()}"),
        *(ROOT / "tests" / "fake_gpu" / "tensorflow_plugin.cc", "-o", built),
        *(f"-L{FOLDER}", "-l:libcuda.so.1", f"-Wl,-rpath,{FOLDER}"),
        *(f"-L{framework}", "-l:libtensorflow_framework.so.2"),
    )
    return built


@needs_fake
def test_operations_stay_on_gpus(plugin: Path) -> None:
    environment = {
        "SIRTAKI_TENSORFLOW_ON_GPUS": "1",
        "SIRTAKI_GPU_LIBRARIES": str(FOLDER),
        "PYTHONPATH": str(ROOT / "tests"),
    }
    finished = run(*hvdrun(2, sys.executable, PROGRAM, plugin, **environment))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("well: ") == 12
    assert "GPUs of 2 ranks: libnccl" in finished.stderr
