"""Every torch body, with ranks as threads over shared memory and over sockets, and as processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from cases import TORCH_MODULES, Case  # imports torch
from tiers import in_worlds, with_kinds
from world import TRANSPORTS, world

pytestmark = pytest.mark.usefixtures("one_thread")
WORLDS = [(1, "shm"), (2, "shm"), (3, "shm"), (2, "socket"), (2, "processes")]
MAIN = {(2, "shm")}
CASES = in_worlds(WORLDS, MAIN, TORCH_MODULES)


@pytest.mark.parametrize(("size", "transport", "case"), with_kinds(CASES, *TRANSPORTS))
def test_as_threads(size: int, transport: str, case: Case) -> None:
    with world(size, transport) as ranks:
        ranks.run(case.body)


@pytest.mark.parametrize(("size", "kind", "case"), with_kinds(CASES, "processes"))
def test_as_processes(size: int, kind: str, case: Case, run_case: Callable[[int, str], None]) -> None:
    run_case(size, case.name)
