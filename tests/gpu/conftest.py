"""Skips tests that need a real GPU where there is none, unless TORCH_TENSORS_ON_GPUS asks for the fakes'."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from gpu.card import IS_DRY_RUN
from process_world import LatestWorld

DRY_RUN_TESTS = 6  # of those that a step selects


@pytest.hookimpl(trylast=True)  # after the selection by -k
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes a few of a step's tests for a dry run: other tests run all of these cases on the fakes."""
    if IS_DRY_RUN and len(items) > DRY_RUN_TESTS:
        items[:] = items[:: len(items) // DRY_RUN_TESTS]


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many GPUs there are."""
    torch = pytest.importorskip("torch")
    count = int(os.environ.get("TORCH_TENSORS_ON_GPUS", "0")) or torch.cuda.device_count()
    if not count:
        pytest.skip("no GPU here")
    return count


@pytest.fixture
def run_on_gpus(gpus: int, latest_world: LatestWorld) -> Callable[..., None]:
    """Runs a case on so many ranks, which share GPUs if there are fewer."""
    return latest_world.run
