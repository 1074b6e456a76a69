"""Torch cases on the fakes' GPUs, through NCCL and staged, with ranks as threads and as processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_gpu import needs_fake

pytest.importorskip("torch")

from cases import GPU_MODULES, TORCH_MODULES, Case, cases_for  # imports torch
from fake_gpu.tensors import FakeTensors
from process_world import LatestWorld
from tiers import in_worlds, with_kinds
from world import world

pytestmark = [needs_fake, pytest.mark.usefixtures("one_thread")]
ALL_KINDS = (
    "torch_collectives",
    "torch_more_collectives",
    "torch_some_ranks",
    "torch_state",
    "torch_sync_batch_norm",
    *GPU_MODULES,
)
WORLDS = [(1, "nccl"), (2, "nccl"), (3, "nccl"), (2, "staged"), (2, "processes")]
MAIN = {(2, "nccl")}
# Cases that say less of GPUs: a single world, of which the second tier runs a sample.
OTHERS = tuple(name for name in TORCH_MODULES if name not in ALL_KINDS)
CASES = in_worlds(WORLDS, MAIN, ALL_KINDS) + in_worlds(MAIN, (), OTHERS, every=6)


@pytest.mark.parametrize(("size", "backend", "case"), with_kinds(CASES, "nccl", "staged"))
def test_as_threads(size: int, backend: str, case: Case) -> None:
    with FakeTensors(size), world(size, gpu_backend=backend) as ranks:
        ranks.run(case.body)


@pytest.mark.parametrize(("size", "kind", "case"), with_kinds(CASES, "processes"))
def test_as_processes(size: int, kind: str, case: Case, run_case_on_gpus: Callable[[int, str], None]) -> None:
    run_case_on_gpus(size, case.name)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases_for(2, GPU_MODULES)])
def test_two_ranks_that_name_two_hosts_on_one_gpu(case: Case, latest_world: LatestWorld) -> None:
    """NCCL tells ranks with different NCCL_HOSTID apart, although they use the same GPU."""
    environment = {"TORCH_TENSORS_ON_GPUS": "1", "SIRTAKI_GPU_BACKEND": "nccl", "NCCL_HOST_PER_RANK": "1"}
    latest_world.run(2, case.name, **environment)
