"""Every torch body, with ranks as threads over shared memory and over sockets, and as processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from cases import TORCH_MODULES, Case, cases_for  # imports torch
from tiers import in_worlds
from world import world

pytestmark = pytest.mark.usefixtures("one_thread")
WORLDS = [(1, "shm"), (2, "shm"), (3, "shm"), (2, "socket")]


@pytest.mark.parametrize(("size", "transport", "case"), in_worlds(WORLDS, {(2, "shm")}, TORCH_MODULES))
def test_as_threads(size: int, transport: str, case: Case) -> None:
    with world(size, transport) as ranks:
        ranks.run(case.body)


@pytest.mark.full
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases_for(2, TORCH_MODULES)])
def test_as_processes(case: Case, run_case: Callable[[int, str], None]) -> None:
    run_case(2, case.name)
