"""Every body, with ranks as processes under hvdrun; each case inits and shuts down anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cases import Case, cases_for
from tiers import full_unless


@pytest.mark.parametrize(
    ("size", "case"),
    [
        pytest.param(size, case, id=f"{size}-{case.name}", marks=full_unless(size == 2))
        for size in (2, 3, 4)
        for case in cases_for(size)
    ],
)
def test_body(size: int, case: Case, run_case: Callable[[int, str], None]) -> None:
    run_case(size, case.name)
