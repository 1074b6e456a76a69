"""Runs the cases that use GPUs on real ones: through NCCL, staged, and with two ranks on one GPU.

first_minute.sh runs them one way after the other, and in a dry run on the fakes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from cases import GPU_MODULES, TORCH_BACKEND_GPU_MODULES, Case, cases_for  # they import torch
from gpu.card import report
from process_world import PATIENCE, hvdrun

import sirtaki.torch as hvd

SHARES_A_GPU = 23003  # the first NCCL with several ranks on one
MOST_RANKS = 4
ONE_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}
STAGED = {"SIRTAKI_GPU_BACKEND": "staged", **ONE_GPU}
# NCCL takes two ranks with different NCCL_HOSTID to be on two hosts, and connects them over sockets. With few
# thread blocks, the kernels of both fit on the GPU.
TWO_HOSTS = {
    **ONE_GPU,
    "SIRTAKI_GPU_BACKEND": "nccl",
    "NCCL_HOST_PER_RANK": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_MAX_CTAS": "2",
}
LOST_RANK = Path(__file__).with_name("lost_rank.py")

ALL = cases_for(2, GPU_MODULES + TORCH_BACKEND_GPU_MODULES)
cases = pytest.mark.parametrize("case", [pytest.param(one, id=one.name) for one in ALL])
Run = Callable[..., None]


@cases
def test_one_rank(case: Case, gpus: int, run_on_gpus: Run) -> None:
    if case.least > 1:
        pytest.skip("it takes two ranks")
    run_on_gpus(1, case.name, SIRTAKI_GPU_BACKEND="nccl")


@cases
def test_a_rank_on_each_gpu(case: Case, gpus: int, run_on_gpus: Run) -> None:
    if gpus < 2:
        pytest.skip("only one GPU here")
    run_on_gpus(min(gpus, MOST_RANKS), case.name, SIRTAKI_GPU_BACKEND="nccl")


@cases
def test_two_ranks_on_one_gpu(case: Case, gpus: int, run_on_gpus: Run) -> None:
    if hvd.nccl_built() < SHARES_A_GPU:
        pytest.skip(f"NCCL {hvd.nccl_built()} allows one rank on a GPU; several need 2.30.3 (23003)")
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}
    run_on_gpus(2, case.name, SIRTAKI_GPU_BACKEND="nccl", **environment, **ONE_GPU)


@cases
def test_two_ranks_on_one_gpu_staged(case: Case, gpus: int, run_on_gpus: Run) -> None:
    run_on_gpus(2, case.name, **STAGED)


@cases
def test_two_hosts_on_one_gpu(case: Case, gpus: int, run_on_gpus: Run) -> None:
    run_on_gpus(2, case.name, **TWO_HOSTS)


@pytest.mark.parametrize("environment", [TWO_HOSTS, STAGED], ids=["nccl", "staged"])
def test_a_killed_rank_ends_the_others(environment: dict[str, str], gpus: int) -> None:
    done = subprocess.run(
        hvdrun(2, sys.executable, LOST_RANK, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        text=True,
    )
    assert done.returncode == 128 + signal.SIGKILL, done.stdout
    assert "rank 0 has lost rank 1" in done.stdout
    killed, lost = (float(seconds) for seconds in re.findall(r"at second ([\d.]+)", done.stdout))
    report(**{f"error_after_kill_{environment['SIRTAKI_GPU_BACKEND']}_ms": round((lost - killed) * 1e3, 3)})
