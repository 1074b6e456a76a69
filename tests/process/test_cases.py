"""Every body, with ranks as processes under hvdrun; each case inits and shuts down anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases import Case
from tiers import in_worlds

WORLDS = [(size, "processes") for size in (2, 3, 4)]
MAIN = {(2, "processes")}


@pytest.mark.parametrize(("size", "kind", "case"), in_worlds(WORLDS, MAIN))
def test_body(size: int, kind: str, case: Case, run_case: Callable[[int, str], None]) -> None:
    run_case(size, case.name)
