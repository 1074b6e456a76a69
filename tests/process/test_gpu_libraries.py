"""Python's report on CUDA's driver and NCCL, in processes of their own: loaded libraries stay loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu import FOLDER, needs_fake
from process_world import PATIENCE, hvdrun

TELL = """
import sirtaki.numpy as hvd
from sirtaki.bindings.gpu import find_libraries
print(int(hvd.cuda_built()), hvd.nccl_built(), hvd.rocm_built())
for library in find_libraries()[:2]:
    print(library.version, library.path, library.text, sep="|")
"""

SUM = """
import torch
from fake_gpu import tensors_on_gpus
import sirtaki.torch as hvd
with tensors_on_gpus():
    hvd.init()
    hvd.allreduce(torch.ones(9), name="loss")
"""
NVIDIAS = [folder for entry in sys.path if (folder := Path(entry, "nvidia", "nccl", "lib")).is_dir()]


def tell(folders: str = "", **environment: str) -> tuple[str, list[list[str]]]:
    """Returns which backends are built, and the findings about both libraries."""
    variables = {**os.environ, "SIRTAKI_GPU_LIBRARIES": folders, **environment}
    ended = subprocess.run(
        [sys.executable, "-c", TELL], capture_output=True, text=True, env=variables, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    built, *libraries = ended.stdout.splitlines()
    return built, [line.split("|") for line in libraries]


@needs_fake
def test_what_is_found_is_built() -> None:
    built, (cuda, nccl) = tell(str(FOLDER))
    assert built == "1 22803 False"
    assert cuda == ["12080", f"{FOLDER}/libcuda.so.1", f"libcuda 12.8 from {FOLDER}/libcuda.so.1"]
    assert nccl == ["22803", f"{FOLDER}/libnccl.so.2", f"libnccl 2.28.3 from {FOLDER}/libnccl.so.2"]


@needs_fake
def test_nccl_alone_is_of_no_use() -> None:
    built, (cuda, nccl) = tell(str(FOLDER), SIRTAKI_FAKE_DEVICES="0")
    assert built == "0 0 False"
    assert "but no GPU: no CUDA-capable device is detected" in cuda[2]
    assert nccl[0] == "22803"


@needs_fake
def test_an_old_nccl_is_of_no_use() -> None:
    built, (_, nccl) = tell(str(FOLDER), SIRTAKI_FAKE_NCCL_VERSION="21803")
    assert built == "1 0 False"
    assert "libnccl 2.18.3" in nccl[2]
    assert "is too old" in nccl[2]


@needs_fake
def test_the_packages_of_nccl_are_looked_into(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcuda.so.1", "libnccl.so.2"):
        (folder / name).symlink_to(FOLDER / name)
    found = tell(PYTHONPATH=str(tmp_path))[1]
    assert [library[1] for library in found] == [f"{folder}/libcuda.so.1", f"{folder}/libnccl.so.2"]
    preferred = tell(str(FOLDER), PYTHONPATH=str(tmp_path))[1]
    assert [library[1] for library in preferred] == [f"{FOLDER}/libcuda.so.1", f"{FOLDER}/libnccl.so.2"]


def test_nccl_uses_the_interfaces_that_are_chosen_for_ranks() -> None:
    code = "import os, sirtaki.numpy as hvd; hvd.init(); print(os.environ.get('NCCL_SOCKET_IFNAME'))"

    def interfaces(*options: str, **environment: str) -> str:
        command = hvdrun(1, *options, sys.executable, "-c", code, **environment)
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    assert interfaces().endswith("None")
    assert interfaces("--network-interfaces", "lo,lo").endswith("=lo,lo")
    assert interfaces(SIRTAKI_NETWORK_INTERFACES="lo", NCCL_SOCKET_IFNAME="ib").endswith(" ib")


def test_what_is_missing_is_told() -> None:
    _, libraries = tell("/nowhere")
    for version, path, text in libraries:
        assert path or (version == "0" and "it is not in /nowhere, " in text)


@needs_fake
@pytest.mark.skipif(not NVIDIAS, reason="pip install '.[gpu-headers]' brings NVIDIA's NCCL")
def test_the_real_nccl_refuses_the_fake_driver_and_says_why() -> None:
    """NVIDIA's library has the functions, and makes an id, but no communicator without a GPU."""
    pytest.importorskip("torch")
    environment = {
        "SIRTAKI_GPU_LIBRARIES": f"{NVIDIAS[0]}:{FOLDER}",
        "SIRTAKI_GPU_BACKEND": "nccl",
        "TORCH_TENSORS_ON_GPUS": "2",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = hvdrun(2, sys.executable, "-c", SUM, **environment)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1, ended.stderr
    assert f" from {NVIDIAS[0]}/libnccl.so.2" in ended.stderr
    assert "'loss': ncclCommInitRankConfig failed; NCCL says: unhandled cuda error" in ended.stderr
