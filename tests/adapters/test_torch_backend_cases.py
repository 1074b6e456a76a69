"""Every body of the backend of torch.distributed, with ranks as processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from cases import TORCH_BACKEND_MODULES, cases_for  # imports torch


@pytest.mark.parametrize("name", [case.name for case in cases_for(2, TORCH_BACKEND_MODULES)])
def test_two_ranks(name: str, run_case: Callable[[int, str], None]) -> None:
    run_case(2, name)


@pytest.mark.full
@pytest.mark.parametrize("name", [case.name for case in cases_for(4, TORCH_BACKEND_MODULES)])
def test_four_ranks(name: str, run_case: Callable[[int, str], None]) -> None:
    run_case(4, name)
