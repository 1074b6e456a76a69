"""Every body of the backend of torch.distributed, with ranks as processes, also on the fakes' GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_gpu import needs_fake

pytest.importorskip("torch")

from cases import TORCH_BACKEND_GPU_MODULES, TORCH_BACKEND_MODULES, cases_for  # imports torch

ON_GPUS = (
    "torch_backend_messages",
    "torch_backend_moving",
    "torch_backend_reducing",
    "torch_backend_training",
    *TORCH_BACKEND_GPU_MODULES,
)


@pytest.mark.parametrize("name", [case.name for case in cases_for(2, TORCH_BACKEND_MODULES)])
def test_two_ranks(name: str, run_case: Callable[[int, str], None]) -> None:
    run_case(2, name)


@needs_fake
@pytest.mark.parametrize("name", [case.name for case in cases_for(2, ON_GPUS)])
def test_two_ranks_on_gpus(name: str, run_case_on_gpus: Callable[[int, str], None]) -> None:
    run_case_on_gpus(2, name)


@pytest.mark.parametrize("name", [case.name for case in cases_for(4, TORCH_BACKEND_MODULES)])
def test_four_ranks(name: str, run_case: Callable[[int, str], None]) -> None:
    run_case(4, name)
