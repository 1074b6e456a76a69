"""Torch cases on the fakes' GPUs, through NCCL and staged, with ranks as threads and as processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_gpu import needs_fake

pytest.importorskip("torch")

from cases import GPU_MODULES, TORCH_MODULES, Case, cases_for  # imports torch
from fake_gpu.tensors import FakeTensors
from tiers import in_worlds
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
FIRST = [(2, "nccl")]
OTHERS = [(1, "nccl"), (3, "nccl"), (2, "staged")]


@pytest.mark.parametrize(
    ("size", "backend", "case"),
    in_worlds(FIRST, FIRST, TORCH_MODULES + GPU_MODULES) + in_worlds(OTHERS, FIRST, ALL_KINDS),
)
def test_as_threads(size: int, backend: str, case: Case) -> None:
    with FakeTensors(size), world(size, gpu_backend=backend) as ranks:
        ranks.run(case.body)


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases_for(2, ALL_KINDS)])
def test_as_processes(case: Case, run_case_on_gpus: Callable[[int, str], None]) -> None:
    run_case_on_gpus(2, case.name)
