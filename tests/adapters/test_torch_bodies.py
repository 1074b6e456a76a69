"""Every torch body, with ranks as threads over shared memory and over sockets, and as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from bodies import TORCH_MODULES, Case, cases_for  # noqa: E402  # they import torch
from world import world  # noqa: E402

WORLDS = [(1, "shm"), (2, "shm"), (3, "shm"), (2, "socket")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Ranks that are threads get their parallelism from there."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("size", "transport", "case"),
    [
        pytest.param(size, transport, case, id=f"{size}-{transport}-{case.name}")
        for size, transport in WORLDS
        for case in cases_for(size, TORCH_MODULES)
    ],
)
def test_as_threads(size: int, transport: str, case: Case) -> None:
    with world(size, transport) as ranks:
        ranks.run(case.body)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases_for(2, TORCH_MODULES)])
def test_as_processes(case: Case, run_case: Callable[[int, str], None]) -> None:
    run_case(2, case.name)
